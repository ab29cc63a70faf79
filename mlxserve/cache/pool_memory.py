"""PoolMemory: the bytes that several kinds share, and how many units of each kind there can be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from mlxserve.cache.groups import Window, max_useful_pages, pages_in

MIN_FULL_PAGES = 2  # full pages, so that a request that has one can continue
_MAX_STATES = 1024  # slots for recurrent states beyond which more are no use


@dataclass(frozen=True, slots=True)
class PoolMemory:
    """The memory that several kinds share.

    nbytes: bytes of the units of all kinds together
    page_bytes: bytes of a page, or of a state, of each kind, by the kind's name
    """

    nbytes: int
    page_bytes: Mapping[str, int]

    def with_more(self, kind: str, count: int) -> PoolMemory:
        """Return the memory with `count` more units of a kind, or fewer if that is negative."""
        return replace(self, nbytes=self.nbytes + count * self.page_bytes[kind])


def max_page_counts(
    nbytes: int,
    page_bytes: int,
    window_page_bytes: int,
    window: Window,
    *,
    num_seqs: int,
    step_tokens: int,
) -> tuple[int, int]:
    """Return the maximum (pages, window pages) in `nbytes`.

    Each leaves memory for one request's pages of the other kind. Where there is a page beside one window, there
    are the pages of that window. Either number may be too small to serve anything.
    """
    num_pages = max(0, pages_in(nbytes - window.num_held * window_page_bytes, page_bytes))
    left = nbytes - window.num_held * page_bytes
    most = max_useful_pages(window, num_seqs, step_tokens)
    num_window_pages = min(most, pages_in(max(0, left), window_page_bytes))
    # A context of fewer pages than a window leaves less than as many full pages take.
    return num_pages, max(num_window_pages, window.num_held if num_pages else 0)


def max_states(nbytes: int, state_bytes: int, page_bytes: int) -> int:
    """Return the maximum number of recurrent states in `nbytes`, which leave memory for the fewest full pages."""
    return min(_MAX_STATES, max(0, nbytes - MIN_FULL_PAGES * page_bytes) // max(1, state_bytes))

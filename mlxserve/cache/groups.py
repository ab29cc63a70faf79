"""Groups of layers by what their rows can see, and the pages that each group needs.

    everything   a page for each `page_size` tokens of a sequence, as long as it runs
    a window     the last positions only: in a pool of its own, with a page table of its own. A page that no
                 later row can see is released

All layers with a window are one group, of the widest of them. A page table of that group has an entry for
every page of its sequence; those before the window name any page, and are never read.

vLLM's coordinator has a group for each window, all in one pool, which takes pages of one size in bytes:
layers are divided into as many parts of equal size. Here the pools are two, so layers may have any shape and
one table serves all windows. Both pools share memory (`pool_memory.py`), or divide it at the start
(`split`).

Plain numbers: neither layers, nor arrays, nor requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# One part in 16 of the memory that the longest context leaves after its own window is for other windows: those of
# running requests, and those that prompts are continued from.
_SPARE = 16
# Windows for which a long context becomes shorter, by half at most. With one, a short prompt waits for the end of
# another client's answer, and two conversations that take turns are computed anew each time.
MIN_WINDOWS = 4
_MAX_PAGES = 1 << 24


@dataclass(frozen=True, slots=True)
class Window:
    """A window of `size` positions that a row sees, including its own, in pages of `page_size` tokens.

    longest_block: rows of an image that one step computes together; 0 if images may be divided
    """

    size: int
    page_size: int
    longest_block: int = 0

    def first_before(self, num_pages: int) -> int:
        """Return the first page that a sequence needs to continue after its first `num_pages` pages."""
        first_seen = num_pages * self.page_size - self.size + 1  # position
        return max(0, min(num_pages, first_seen // self.page_size))

    @property
    def num_seen(self) -> int:
        """Maximum number of pages that a sequence needs to continue at the end of a page."""
        return -(-(self.size - 1) // self.page_size)

    @property
    def num_held(self) -> int:
        """Number of pages that suffice for a request of any length.

        They are the pages it sees, one that it writes, and the next one, which it may get before the
        first is released. A block needs its own pages as well.
        """
        return self.num_seen + 2 + -(-self.longest_block // self.page_size)

    def num_windows(self, num_pages: int) -> float:
        """Return how many requests longer than the window can run together in `num_pages` pages."""
        return num_pages / self.num_held


def window_of(windows: Sequence[int | None]) -> int | None:
    """Return the widest window of the layers; None if all layers have one, or none has.

    windows: that of every layer, None for a layer that sees everything
    """
    sizes = [window for window in windows if window is not None]
    return max(sizes) if 0 < len(sizes) < len(windows) else None


def max_useful_pages(window: Window, num_seqs: int, step_tokens: int) -> int:
    """Return the number of window pages beyond which more are no use.

    With these, `num_seqs` requests run together, as many prompts can be continued from their last windows,
    and two steps of `step_tokens` tokens compute prompts.
    """
    return 2 * num_seqs * window.num_held + 2 * -(-step_tokens // window.page_size)


def _other_windows(window: Window, window_page_bytes: int, num_seqs: int) -> int:
    """Return the bytes of the windows, beside its own, for which a long context becomes shorter."""
    return (min(MIN_WINDOWS, num_seqs) - 1) * window.num_held * window_page_bytes


def _bytes_of(num_tokens: int, window: Window, page_bytes: int) -> int:
    return -(-num_tokens // window.page_size) * page_bytes


def pages_in(nbytes: int, page_bytes: int) -> int:
    """Return how many pages fit into `nbytes`; unbounded if a page needs no memory on this rank."""
    return nbytes // page_bytes if page_bytes else _MAX_PAGES


def split(
    nbytes: int,
    page_bytes: int,
    window_page_bytes: int,
    window: Window,
    *,
    longest: int,
    num_seqs: int,
    step_tokens: int,
    is_promised: bool = False,
) -> tuple[int, int]:
    """Divide `nbytes` into (pages, window pages).

    One request of `longest` tokens comes first, with a part of its memory for other windows; the windows get
    half of the rest, up to the pages that they can use. `MIN_WINDOWS`, or one for each request if fewer run,
    come before the second half of that context, unless it `is_promised`. Either number may be too small to
    serve anything.
    """
    least = window.num_held
    left = nbytes - least * window_page_bytes
    context = min(left, _bytes_of(longest, window, page_bytes))
    kept = context if is_promised else context // 2
    others = _other_windows(window, window_page_bytes, num_seqs)
    spare = max(left // _SPARE, (left - context) // 2, min(others, left - kept))
    most = max_useful_pages(window, num_seqs, step_tokens)
    num_window_pages = min(most, least + pages_in(max(0, spare), window_page_bytes))
    return pages_in(nbytes - num_window_pages * window_page_bytes, page_bytes), num_window_pages

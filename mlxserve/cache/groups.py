"""Groups of layers by what their rows can see, and the pages that each group needs.

    everything   a page for each `page_size` tokens of a sequence, as long as it runs
    a window     the last positions only: in a pool of its own, with a page table of its own. A page that no
                 later row can see is given back

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

# Of the memory that the longest context leaves after its own window, the part that is for other windows:
# running requests', and those that prompts are continued from.
_SPARE = 16  # one in
# Windows for which a long context becomes shorter, by half at most. With one, a short prompt waits for the end of
# another client's answer, and two conversations that take turns are computed anew each time.
MIN_WINDOWS = 4
_MAX_PAGES = 1 << 24


@dataclass(frozen=True, slots=True)
class Window:
    """`size`: positions that a row sees, its own included. `page_size`: tokens of a page."""

    size: int
    page_size: int

    def first_seen(self, position: int) -> int:
        """The first page that the row at `position` sees: the pages before it are not needed for it,
        nor for any later row."""
        return max(0, position - self.size + 1) // self.page_size

    def first_before(self, num_pages: int) -> int:
        """The first page that a sequence needs to go on after its first `num_pages` pages."""
        return min(num_pages, self.first_seen(num_pages * self.page_size))

    @property
    def num_seen(self) -> int:
        """Most pages that a sequence needs to go on at the end of a page."""
        return -(-(self.size - 1) // self.page_size)

    @property
    def num_held(self) -> int:
        """Pages with which a request goes on, however long: those it needs, one that it writes, and
        the next one, which it may get before the first is given back."""
        return self.num_seen + 2

    def num_windows(self, num_pages: int) -> float:
        """Requests longer than the window that go on beside each other with so many pages."""
        return num_pages / self.num_held


def window_of(windows: Sequence[int | None]) -> int | None:
    """The window of the layers that are a group of their own; None if there is only one group.

    windows: of every layer; None for one that sees everything
    """
    found = [window for window in windows if window is not None]
    return max(found) if 0 < len(found) < len(windows) else None


def wanted(window: Window, num_seqs: int, step_tokens: int) -> int:
    """Pages with which `num_seqs` requests run beside each other, while as many prompts can be continued
    from their last windows, and two steps of `step_tokens` tokens compute prompts."""
    return 2 * num_seqs * window.num_held + 2 * -(-step_tokens // window.page_size)


def _others(window: Window, window_page_bytes: int, num_seqs: int) -> int:
    """Bytes of the windows that make a context shorter, beside its own."""
    return (min(MIN_WINDOWS, num_seqs) - 1) * window.num_held * window_page_bytes


def _bytes_of(num_tokens: int, window: Window, page_bytes: int) -> int:
    return -(-num_tokens // window.page_size) * page_bytes


def num_in(nbytes: int, page_bytes: int) -> int:
    """Pages in so many bytes; more than any other rank has where a page takes none here."""
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
    """(pages, window pages) for `nbytes`: what one request of `longest` tokens needs comes first, with a
    part of it for other windows; of what is left the windows get half, up to what they can use.

    `MIN_WINDOWS`, or one for each request where fewer run, come before the second half of that context, unless
    it `is_promised`. Either number may be too small to serve anything.
    """
    least = window.num_held
    left = nbytes - least * window_page_bytes
    context = min(left, _bytes_of(longest, window, page_bytes))
    kept = context if is_promised else context // 2
    others = _others(window, window_page_bytes, num_seqs)
    spare = max(left // _SPARE, (left - context) // 2, min(others, left - kept))
    most = wanted(window, num_seqs, step_tokens)
    num_window_pages = min(most, least + num_in(max(0, spare), window_page_bytes))
    return num_in(nbytes - num_window_pages * window_page_bytes, page_bytes), num_window_pages

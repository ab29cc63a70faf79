"""BlankPages: pages without content, and how many ids of a pool have been opened so far.

    0 .......... num_open ............ limit ............... num_pages
    taken or blank        blank, without        not to be had now: other kinds
                          memory yet            have their bytes

Knows ids only. Whoever has the arrays gives memory to the opened ids before they are written.
"""

from __future__ import annotations

from mlxserve.cache.runs import RunSet

_NEARLY_USED = 4  # pages of which one is blank: from then on more will be opened soon


class BlankPages:
    """The blank ones of `num_pages` ids, of which the first `num_open` are open."""

    def __init__(self, num_pages: int, num_open: int | None = None) -> None:
        """`num_open`: None opens all."""
        assert num_open is None or 0 < num_open <= num_pages
        self.num_pages = num_pages
        self.num_open = num_open or num_pages
        self.num_first = num_open  # as passed, for a successor
        self.limit = num_pages  # ids that may be opened; fewer where pools share memory (`Arena`)
        self.opened = RunSet(self.num_open)  # blank ids that are open

    @property
    def count(self) -> int:
        """Pages that can be allocated without evicting one."""
        return self.opened.count + self.limit - self.num_open

    def open(self, num_missing: int) -> None:
        """Open ids for this many pages, if there are any; more, as growing copies what is there."""
        if num_missing <= 0 or self.num_open == self.limit:
            return
        num_open = min(self.limit, max(self.num_open + num_missing, self._next_open))
        self.opened.extend(self.num_open, num_open - self.num_open)
        self.num_open = num_open

    @property
    def _next_open(self) -> int:
        return min(self.limit, self.num_open * 3 // 2)

    @property
    def open_soon(self) -> int | None:
        """Ids that will be open once the blank ones are used, if most of them are; None otherwise."""
        is_soon = self.opened.count * _NEARLY_USED < self.num_open < self.limit
        return self._next_open if is_soon else None

    def grow(self, num_pages: int) -> None:
        """Have ids 0 .. `num_pages`-1 from now on. New ids are open only where all others are."""
        if num_pages > self.num_pages and self.num_open == self.num_pages:
            self.opened.extend(self.num_pages, num_pages - self.num_pages)
            self.num_open = num_pages
        self.limit += num_pages - self.num_pages
        self.num_pages = num_pages

    def lower(self, limit: int) -> None:
        """Open no ids from `limit` on, and close those that are; they must be blank."""
        self.limit = limit
        if limit < self.num_open:
            self.opened.cut_off(limit)
            self.num_open = limit

    def ids(self) -> set[int]:
        """Ids of all blank pages, audited. Raises AssertionError."""
        self.opened.check()
        blank = {page for first, n in self.opened.runs() for page in range(first, first + n)}
        assert max(blank, default=0) < self.num_open, "a page is blank that is not open"
        assert self.num_open <= self.limit <= self.num_pages, "pages are open beyond the limit"
        return blank | set(range(self.num_open, self.num_pages))

"""BlankPages: pages without content, and how many ids of a pool have been opened so far.

    0 .......... num_open ............ limit ............... num_pages
    taken or blank        blank, without        closed: other kinds have
                          memory yet            their bytes

Knows ids only. The owner of the arrays allocates memory for opened ids before they are written.
"""

from __future__ import annotations

from mlxserve.cache.runs import RunSet

_NEARLY_USED = 4  # once fewer than one page in 4 is blank, more will be opened soon


class BlankPages:
    """The blank pages among `num_pages` ids. The first `num_open` ids are open."""

    def __init__(self, num_pages: int, num_open: int | None = None) -> None:
        """Open the first `num_open` ids; None opens all."""
        assert num_open is None or 0 < num_open <= num_pages
        self.num_pages = num_pages
        self.num_open = num_open or num_pages
        self.num_first = num_open  # as passed, for `PagePool.renewed`
        self.limit = num_pages  # ids that may be opened; fewer where pools share memory (`Balance`)
        self.opened = RunSet(self.num_open)  # blank ids that are open

    @property
    def count(self) -> int:
        """Number of pages that can be allocated without an eviction."""
        return self.opened.count + self.limit - self.num_open

    def open(self, num_missing: int) -> None:
        """Open ids for at least `num_missing` pages, as far as the limit allows.

        Opens half as many again as are open, because growing the arrays copies them.
        """
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
        """Number of ids that will be open soon; None unless most blank ones are used."""
        is_soon = self.opened.count * _NEARLY_USED < self.num_open < self.limit
        return self._next_open if is_soon else None

    def grow(self, num_pages: int) -> None:
        """Extend the ids to 0 .. `num_pages`-1. New ids are open only if all others are."""
        if num_pages > self.num_pages and self.num_open == self.num_pages:
            self.opened.extend(self.num_pages, num_pages - self.num_pages)
            self.num_open = num_pages
        self.limit += num_pages - self.num_pages
        self.num_pages = num_pages

    def lower(self, limit: int) -> None:
        """Close the ids from `limit` on, which must be blank."""
        self.limit = limit
        if limit < self.num_open:
            self.opened.cut_off(limit)
            self.num_open = limit

    def audited_ids(self) -> set[int]:
        """Audit, and return the ids of all blank pages. Raises AssertionError."""
        self.opened.check()
        blank = {page for first, n in self.opened.runs() for page in range(first, first + n)}
        assert max(blank, default=0) < self.num_open, "a page is blank that is not open"
        assert self.num_open <= self.limit <= self.num_pages, "pages are open beyond the limit"
        return blank | set(range(self.num_open, self.num_pages))

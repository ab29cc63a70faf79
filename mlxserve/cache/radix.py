"""Children: pages by the hash of the page before them, newest first.

    newest[parent] ──▶ page ──older──▶ page ──older──▶ page        and newer, the other way

Knows ids and hashes only. Uses links in lists instead of a dictionary per parent, because nearly
every parent has one child: dictionaries took 230 bytes per page and half of the time to publish it.
"""

from __future__ import annotations

from collections.abc import Iterator


class Children:
    """A filing of ids 0 .. n-1, each under at most one parent."""

    def __init__(self, num_ids: int) -> None:
        self._newest: dict[bytes, int] = {}
        self._older: list[int | None] = [None] * num_ids
        self._newer: list[int | None] = [None] * num_ids

    def add(self, parent: bytes, page: int) -> None:
        """File a page, which must not be filed yet."""
        older = self._newest.get(parent)
        self._newest[parent] = page
        if older is not None:
            self._older[page] = older
            self._newer[older] = page

    def remove(self, parent: bytes, page: int) -> None:
        """Remove a page, which must be filed under this parent."""
        older, newer = self._older[page], self._newer[page]
        if newer is not None:
            self._older[newer] = older
        elif older is not None:
            self._newest[parent] = older
        else:
            del self._newest[parent]
        if older is not None:
            self._newer[older] = newer
        self._older[page] = self._newer[page] = None

    def grow(self, num_ids: int) -> None:
        """Extend the ids to 0 .. `num_ids`-1."""
        for links in (self._older, self._newer):
            links += [None] * (num_ids - len(links))

    def has(self, parent: bytes) -> bool:
        """Return True if a page is filed under this parent."""
        return parent in self._newest

    def has_several(self, parent: bytes) -> bool:
        """Return True if more than one page is filed under this parent."""
        newest = self._newest.get(parent)
        return newest is not None and self._older[newest] is not None

    def children_of(self, parent: bytes) -> Iterator[int]:
        """Yield the pages under this parent, newest first."""
        page = self._newest.get(parent)
        while page is not None:
            yield page
            page = self._older[page]

    def filed(self) -> list[tuple[bytes, int]]:
        """Return (parent, page) of every filed page."""
        return [(parent, page) for parent in self._newest for page in self.children_of(parent)]

    def check(self) -> None:
        """Audit that both links of every pair agree. Raises AssertionError."""
        pages = [page for _, page in self.filed()]
        assert len(set(pages)) == len(pages), "a page is filed twice"
        for page, older in enumerate(self._older):
            assert older is None or self._newer[older] == page, f"page {page}: links disagree"
        num_linked = sum(older is not None for older in self._older)
        assert num_linked == sum(newer is not None for newer in self._newer), "a link is left over"
        assert num_linked == len(pages) - len(self._newest), "a page is linked, but not filed"

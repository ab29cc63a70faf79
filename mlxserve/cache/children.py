"""Children: pages by the hash of what stands before them, the newest first.

    newest[parent] ──▶ page ──older──▶ page ──older──▶ page        and newer, the other way

Knows ids and hashes only. Links in lists instead of a dictionary for each parent, which nearly
always has one child: those took 230 bytes for each page, and half of a page's publishing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping


class Children:
    """Of ids 0 .. n-1, each is filed under one parent at most."""

    def __init__(self, num_ids: int) -> None:
        self._newest: dict[bytes, int] = {}
        self._older: list[int | None] = [None] * num_ids
        self._newer: list[int | None] = [None] * num_ids

    def add(self, parent: bytes, page: int) -> None:
        """File a page that is not filed yet."""
        older = self._newest.get(parent)
        self._newest[parent] = page
        if older is not None:
            self._older[page] = older
            self._newer[older] = page

    def remove(self, parent: bytes, page: int) -> None:
        """Take a page out that is filed under this parent."""
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

    def renumbered(self, num_ids: int, moves: Mapping[int, int]) -> Children:
        """The same of ids 0 .. `num_ids`-1, where `moves` has the new ids of some pages."""
        other = Children(num_ids)
        for parent, page in reversed(self.filed()):
            other.add(parent, moves.get(page, page))
        return other

    def has(self, parent: bytes) -> bool:
        """Whether any page is filed under it."""
        return parent in self._newest

    def of(self, parent: bytes) -> Iterator[int]:
        """The newest first."""
        page = self._newest.get(parent)
        while page is not None:
            yield page
            page = self._older[page]

    def filed(self) -> list[tuple[bytes, int]]:
        """(parent, page) of every page that is filed."""
        return [(parent, page) for parent in self._newest for page in self.of(parent)]

    def check(self) -> None:
        """Audit: the links of every page lead there and back. Raises AssertionError."""
        pages = [page for _, page in self.filed()]
        assert len(set(pages)) == len(pages), "a page is filed twice"
        for page, older in enumerate(self._older):
            assert older is None or self._newer[older] == page, f"page {page}: links disagree"
        num_linked = sum(older is not None for older in self._older)
        assert num_linked == sum(newer is not None for newer in self._newer), "a link is left over"
        assert num_linked == len(pages) - len(self._newest), "a page is linked, but not filed"

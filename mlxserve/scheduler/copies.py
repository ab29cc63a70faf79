"""Copies: pages that begin as other pages do, because they will continue differently.

    a fork's tail            the page that its prompt ends in, which its leader writes to next
    a named prefix's tail    the page that the prefix ends in: each request continues it on its own
    a prompt's last page     cached whole, but its last token is computed again, for its logits

The page tables hold the source until the copy is made, so that it is not handed out meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from mlxserve.request import LiveRequest


@dataclass(frozen=True, slots=True)
class PageCopy:
    """Make page `target` hold what page `source` holds."""

    source: int
    target: int


@dataclass(slots=True)
class Copies:
    """The copies to make before the next launch, by the request they are for."""

    _copies: dict[LiveRequest, PageCopy] = field(default_factory=dict)

    def add(self, request: LiveRequest, source: int, target: int) -> None:
        """`target` is a page of the request."""
        assert request not in self._copies, f"{request.id} has two tails"
        self._copies[request] = PageCopy(source, target)

    def pop(self, request: LiveRequest) -> PageCopy | None:
        """The request's copy, which is not to be made any more."""
        return self._copies.pop(request, None)

    def pop_all(self) -> list[PageCopy]:
        copies = list(self._copies.values())
        self._copies.clear()
        return copies

    def held(self) -> Iterator[list[int]]:
        """Pages held for copies, as page tables."""
        return ([copy.source] for copy in self._copies.values())

    def check(self) -> None:
        """Audit. Raises AssertionError."""
        for request, copy in self._copies.items():
            assert copy.target in request.page_table, f"{request.id} has lost its copy"

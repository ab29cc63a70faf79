"""Copies: pages that are to begin as other pages do, because they will go on differently.

    a fork's tail            the page that its prompt ends in, which its leader writes on in
    a named prefix's tail    the page that the prefix ends in: each request writes on behind it
    a prompt's last page     cached whole, but its last token is computed again, for its logits

The source has one holder more until its copy is made, so that nobody else gets it meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from mlxserve.cache.pages import PagePool
from mlxserve.request import LiveRequest
from mlxserve.stats import SchedulerStats


@dataclass(frozen=True, slots=True)
class PageCopy:
    """Make page `target` hold what page `source` holds."""

    source: int
    target: int


@dataclass(slots=True)
class Copies:
    """Those that have to be made before the next launch, by the request they are for."""

    pool: PagePool
    stats: SchedulerStats
    _copies: dict[LiveRequest, PageCopy] = field(default_factory=dict)

    def add(self, request: LiveRequest, source: int, target: int) -> None:
        """The target is a page of the request. One holder of the source is handed over."""
        assert request not in self._copies, f"{request.id} has two tails"
        self._copies[request] = PageCopy(source, target)

    def take(self) -> list[PageCopy]:
        """The copies to make now. A step that is launched after that may write to the sources."""
        copies = list(self._copies.values())
        self._copies.clear()
        self.stats.tail_copies += len(copies)
        self.pool.release([copy.source for copy in copies])
        return copies

    def drop(self, request: LiveRequest) -> None:
        """It gives its pages up; no-op if none was to become a copy."""
        if (copy := self._copies.pop(request, None)) is not None:
            self.pool.release([copy.source])

    def renumber(self, moves: Mapping[int, int]) -> None:
        """Pages have moved, to those that `moves` names."""
        for request, copy in self._copies.items():
            source, target = (moves.get(page, page) for page in (copy.source, copy.target))
            self._copies[request] = PageCopy(source, target)

    def held(self) -> Iterable[list[int]]:
        """Pages held for copies, as page tables."""
        return ([copy.source] for copy in self._copies.values())

    def check(self) -> None:
        """Audit. Raises AssertionError."""
        for request, copy in self._copies.items():
            assert copy.target in request.page_table, f"{request.id} has lost its copy"

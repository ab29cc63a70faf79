"""Lending: what a kind's pages are worth, for memory that several kinds share.

Pages are counted; whoever compares kinds knows the bytes of a page of each.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from math import inf

from mlxserve.cache.pages import PagePool
from mlxserve.request import LiveRequest, PageTable, as_page_table

_FEWEST = 2  # full pages, so that a request with one can go on
_HOT = 2.0  # times as likely to be asked for again: pages that were hit often


class Lending(ABC):
    """Of the pages of one kind.

    num_at_start: pages that it has at first, where it does not get what others leave
    num_fewest: pages that it never gives
    """

    name: str
    pool: PagePool
    num_at_start = 0
    num_fewest = _FEWEST

    @property
    def num_spare(self) -> int:
        """Pages that can be taken without losing anything."""
        return self.pool.blank.count + len(self.pool.order.lost)

    @abstractmethod
    def next_cost(self) -> float:
        """Tokens that would be computed again without the page that is evicted next, for how long ago it was used."""

    def pop_lost(self) -> list[bytes]:
        """Places that were given up since the last call, up to which full pages are of no use."""
        return []

    def has_end(self, hash_: bytes) -> bool:  # noqa: ARG002
        """Whether a sequence can go on after the page of this hash, though not after those around it."""
        return False

    @abstractmethod
    def make_room(self, count: int) -> None:
        """Have so many pages blank or evicted next, the ones first that cost least."""

    @abstractmethod
    def table(self, request: LiveRequest) -> PageTable:
        """Pages that the request holds."""

    @abstractmethod
    def named(self, request: LiveRequest) -> PageTable:
        """Pages that the request's table names, whether it holds them or not."""

    @abstractmethod
    def rename(self, request: LiveRequest, targets: Mapping[int, int]) -> None:
        """Pages that the request holds have other ids, and its table names no others."""

    @abstractmethod
    def num_left(self, request: LiveRequest) -> int:
        """Pages that a running prompt still takes before it gives any back."""

    @abstractmethod
    def num_first(self, request: LiveRequest, num_cached: int) -> int:
        """Pages that a waiting request takes if it begins after `num_cached` pages."""


class FullLending(Lending):
    """Pages that are evicted one after the other, least recently used first."""

    def __init__(self, pool: PagePool, name: str) -> None:
        self.pool = pool
        self.name = name

    def next_cost(self) -> float:
        order = self.pool.order
        if order.lost:
            return 0.0
        for weight, pages in ((1.0, order.normal), (_HOT, order.hot)):
            if pages:
                used = next(iter(pages.values()))
                return weight * self.pool.page_size / (1 + order.clock - used)
        return inf

    def make_room(self, count: int) -> None:
        """They are evicted in that order in any case."""

    def table(self, request: LiveRequest) -> PageTable:
        return request.page_table

    def named(self, request: LiveRequest) -> PageTable:
        return request.page_table

    def rename(self, request: LiveRequest, targets: Mapping[int, int]) -> None:
        renamed = [targets.get(page, page) for page in request.page_table]
        request.page_table = as_page_table(renamed)

    def num_left(self, request: LiveRequest) -> int:
        return max(0, -(-request.prefill_end // self.pool.page_size) - len(request.page_table))

    def num_first(self, request: LiveRequest, num_cached: int) -> int:
        return -(-len(request.token_ids) // self.pool.page_size) - num_cached

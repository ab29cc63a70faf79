"""Lending: what a kind's pages are worth, for memory that several kinds share.

Pages are counted; whoever compares kinds knows the bytes of a page of each.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from math import inf

from mlxserve.cache.pages import PagePool
from mlxserve.request import LiveRequest, PageTable, as_page_table

_FEWEST = 2  # full pages, so that a request with one can go on
_HOT = 2.0  # times as likely to be asked for again: pages that were hit often


class Lending(ABC):
    """Of the pages of one kind.

    num_at_start: pages that it has at first, where it does not get what others leave
    num_fewest: pages that it never gives
    weight: bytes of a page, relative to those of a full page
    """

    name: str
    pool: PagePool
    num_at_start = 0
    num_fewest = _FEWEST
    weight = 1.0

    @property
    def num_spare(self) -> int:
        """Pages that can be taken without losing anything."""
        return self.pool.blank.count + len(self.pool.order.lost)

    @abstractmethod
    def next_cost(self) -> float:
        """Tokens that would be computed again without what is evicted next, for how long ago it was used and for
        each full page that has as many bytes."""

    def settle(self) -> None:  # noqa: B027 (a kind without others has nothing to do)
        """Evict what is of no use since other kinds have given something up first."""

    def pop_lost(self) -> list[bytes]:
        """Places that were given up since the last call, up to which full pages are of no use."""
        return []

    def has_end(self, hash_: bytes) -> bool:  # noqa: ARG002
        """Whether a sequence can go on after the page of this hash, though not after those around it."""
        return False

    def cheapest_leaf(self, is_free: Callable[[bytes], bool]) -> tuple[float, bytes] | None:  # noqa: ARG002
        """(cost, hash of a full page) of the place to give up first of those up to which full pages are of use,
        and that no later place is known after; None if there is none.

        is_free: whether the full page of a hash can be evicted
        """
        return None

    def give_up(self, end: bytes) -> None:
        """Give up a place."""
        raise KeyError(end)

    def next_lost(self) -> list[tuple[bytes, int]]:
        """(hash, page) of the pages of places that are given up next, if that is soon."""
        return []

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
    def num_first(self, request: LiveRequest, cached: Sequence[int]) -> int:
        """Free pages that a waiting request takes if it begins after these full pages, those it finds included."""


class FullLending(Lending):
    """Pages that are evicted one after the other, least recently used first; where other kinds limit of what use
    they are, with the places after which those can go on."""

    def __init__(self, pool: PagePool, name: str, others: Sequence[Lending] = ()) -> None:
        self.pool = pool
        self.name = name
        self._others = others

    def next_cost(self) -> float:
        order = self.pool.order
        if order.lost:
            return 0.0
        if (cheapest := self._cheapest()) is not None:
            return cheapest[0]
        for weight, pages in ((1.0, order.normal), (_HOT, order.hot)):
            if pages:
                used = next(iter(pages.values()))
                return weight * self.pool.page_size / (1 + order.clock - used)
        return inf

    def make_room(self, count: int) -> None:
        if count <= self.num_spare:
            return
        self.settle()
        while count > self.num_spare and (cheapest := self._cheapest()) is not None:
            _, end, other = cheapest
            other.give_up(end)
            self.settle()

    def _cheapest(self) -> tuple[float, bytes, Lending] | None:
        found = [(other.cheapest_leaf(self._is_free), other) for other in self._others]
        costs = [(*leaf, other) for leaf, other in found if leaf is not None]
        return min(costs, key=lambda cost: cost[0], default=None)

    def _is_free(self, hash_: bytes) -> bool:
        page = self.pool.index.find(hash_)
        return page in self.pool.order.normal or page in self.pool.order.hot

    def settle(self) -> None:
        """Evict the pages first that are of no use since places were given up."""
        for other in self._others:
            for end in other.pop_lost():
                self._lose_around(end)

    def _lose_around(self, end: bytes) -> None:
        """The pages that follow a place which is gone, and those that lead to it alone."""
        index = self.pool.index
        following = index.with_following([end])
        if any(map(self._has_end, following)):
            return
        pages = [page for page in map(index.find, reversed(following)) if page is not None]
        page = index.find(end)
        while page is not None:
            parent = index.parent_of(page)
            page = index.find(parent)
            is_shared = not index.is_followed_by_one(parent)
            if page is None or is_shared or self._has_end(parent) or not self._is_free(parent):
                break
            pages.append(page)
        self.pool.order.lose(pages)

    def _has_end(self, hash_: bytes) -> bool:
        return any(other.has_end(hash_) for other in self._others)

    def table(self, request: LiveRequest) -> PageTable:
        return request.page_table

    def named(self, request: LiveRequest) -> PageTable:
        return request.page_table

    def rename(self, request: LiveRequest, targets: Mapping[int, int]) -> None:
        renamed = [targets.get(page, page) for page in request.page_table]
        request.page_table = as_page_table(renamed)

    def num_left(self, request: LiveRequest) -> int:
        return max(0, -(-request.prefill_end // self.pool.page_size) - len(request.page_table))

    def num_first(self, request: LiveRequest, cached: Sequence[int]) -> int:
        missing = -(-len(request.token_ids) // self.pool.page_size) - len(cached)
        return missing + self.pool.num_idle(cached)

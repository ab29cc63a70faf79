"""Reclaimer: the pages of one kind and the cost of reclaiming them, for kinds that share memory.

Counts pages; the caller that compares kinds (`Balance`) knows the bytes of a page of each.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from math import inf

from mlxserve.cache.pages import PagePool
from mlxserve.request import LiveRequest, PageTable, as_page_table

_MIN_FULL_PAGES = 2  # full pages, so that a request that has one can continue
_HOT = 2.0  # how much more likely pages that were hit often are hit again


class Reclaimer(ABC):
    """The pages of one kind, which can give memory to other kinds and take it from them.

    initial_pages: pages at the start, for all kinds but the one that gets the rest of the memory
    min_pages: pages that the kind keeps in any case
    weight: bytes of a page, relative to those of a full page
    """

    name: str
    pool: PagePool
    initial_pages = 0
    min_pages = _MIN_FULL_PAGES
    weight = 1.0

    @abstractmethod
    def next_cost(self) -> float:
        """Return the cost of the next eviction.

        In tokens to compute again, per full page of the freed bytes and per request ended since the last use.
        """

    def apply_dropped_ends(self) -> None:  # noqa: B027 (no other kind limits the use of most kinds)
        """Mark pages as useless that no sequence can continue from since other kinds dropped theirs."""

    def pop_dropped_ends(self) -> list[bytes]:
        """Return the hashes of the ends that were dropped since the last call."""
        return []

    def has_end(self, hash_: bytes) -> bool:  # noqa: ARG002
        """Return True if the page with this hash is an end: a sequence can continue after it."""
        return False

    def cheapest_leaf(self, is_free: Callable[[bytes], bool]) -> tuple[float, bytes] | None:  # noqa: ARG002
        """Return (cost, hash) of the cheapest end that is in no later end's window; None if there is none.

        is_free: tells if the full page with a hash can be evicted
        """
        return None

    def drop_end(self, end: bytes) -> None:
        """Drop an end, by its hash."""
        raise KeyError(end)

    def next_dropped(self) -> list[tuple[bytes, int]]:
        """Return (hash, page) of the pages of the ends that will be dropped soon."""
        return []

    @abstractmethod
    def make_room(self, count: int) -> None:
        """Make `count` pages blank or useless, in the order of their cost."""

    @abstractmethod
    def table(self, request: LiveRequest) -> PageTable:
        """Return the pages that the request holds."""

    @abstractmethod
    def named(self, request: LiveRequest) -> PageTable:
        """Return the page ids in the request's table, whether it holds these pages or not."""

    @abstractmethod
    def rename(self, request: LiveRequest, targets: Mapping[int, int]) -> None:
        """Replace the page ids in the request's table by their `targets`."""

    @abstractmethod
    def num_to_allocate(self, request: LiveRequest) -> int:
        """Return the number of pages that a running prompt will allocate before it releases any."""

    @abstractmethod
    def num_at_begin(self, request: LiveRequest, cached: Sequence[int]) -> int:
        """Return the free pages that a waiting request takes if it begins after these full pages.

        Cached pages that are free count as well.
        """


class FullPageReclaimer(Reclaimer):
    """The full pages, which are evicted one by one, least recently used first.

    Where other kinds limit how much of a prefix is usable, whole conversations are dropped with their ends.
    """

    def __init__(self, pool: PagePool, name: str, others: Sequence[Reclaimer] = ()) -> None:
        self.pool = pool
        self.name = name
        self._others = others

    def next_cost(self) -> float:
        order = self.pool.order
        if order.useless:
            return 0.0
        if (cheapest := self._cheapest()) is not None:
            return cheapest[0]
        for weight, pages in ((1.0, order.normal), (_HOT, order.hot)):
            if pages:
                used = next(iter(pages.values()))
                return weight * self.pool.page_size / (1 + order.clock - used)
        return inf

    def make_room(self, count: int) -> None:
        if count <= self.pool.num_spare:
            return
        self.apply_dropped_ends()
        while count > self.pool.num_spare and (cheapest := self._cheapest()) is not None:
            _, end, other = cheapest
            other.drop_end(end)
            self.apply_dropped_ends()

    def _cheapest(self) -> tuple[float, bytes, Reclaimer] | None:
        leaves = [(other.cheapest_leaf(self._is_free), other) for other in self._others]
        costs = [(*leaf, other) for leaf, other in leaves if leaf is not None]
        return min(costs, key=lambda cost: cost[0], default=None)

    def _is_free(self, hash_: bytes) -> bool:
        page = self.pool.index.find(hash_)
        return page in self.pool.order.normal or page in self.pool.order.hot

    def apply_dropped_ends(self) -> None:
        """Mark the pages as useless that led to dropped ends."""
        for other in self._others:
            for end in other.pop_dropped_ends():
                self._mark_around(end)

    def _mark_around(self, end: bytes) -> None:
        """Mark pages around a dropped end as useless: those after it, and those that lead only to it."""
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
        self.pool.order.mark_useless(pages)

    def _has_end(self, hash_: bytes) -> bool:
        return any(other.has_end(hash_) for other in self._others)

    def table(self, request: LiveRequest) -> PageTable:
        return request.page_table

    def named(self, request: LiveRequest) -> PageTable:
        return request.page_table

    def rename(self, request: LiveRequest, targets: Mapping[int, int]) -> None:
        renamed = [targets.get(page, page) for page in request.page_table]
        request.page_table = as_page_table(renamed)

    def num_to_allocate(self, request: LiveRequest) -> int:
        return max(0, -(-request.prefill_end // self.pool.page_size) - len(request.page_table))

    def num_at_begin(self, request: LiveRequest, cached: Sequence[int]) -> int:
        missing = -(-len(request.token_ids) // self.pool.page_size) - len(cached)
        return missing + self.pool.num_idle(cached)

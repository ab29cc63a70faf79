"""Reclaimer: the units of one kind and the cost of reclaiming them, for kinds that share memory.

Counts units; the caller that compares kinds (`Balance`) knows the bytes of a unit of each.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from math import inf

from mlxserve.cache.pages import PagePool
from mlxserve.cache.pool_memory import MIN_FULL_PAGES
from mlxserve.request import LiveRequest, PageTable, as_page_table

_HOT = 2.0  # how much more likely pages that were hit often are hit again


@dataclass(frozen=True, slots=True)
class Resize:
    """A change of a kind's memory to at most `num_units` units.

    sources: pages to copy to `targets` before the arrays shrink
    dropped: names of the units to drop, of a kind that has no arrays of pages
    """

    kind: str
    num_units: int
    sources: Sequence[int] = ()
    targets: Sequence[int] = ()
    dropped: Sequence[int] = ()


class Reclaimer(ABC):
    """The units of one kind, which can give memory to other kinds and take it from them.

    initial_units: units at the start, for all kinds but the one that gets the rest of the memory
    min_units: units that the kind keeps in any case
    weight: bytes of a unit, relative to those of a full page
    num_for_drafts: units that drafts of the last plan lacked; other kinds give what costs them less
    """

    name: str
    initial_units = 0
    min_units = MIN_FULL_PAGES
    weight = 1.0
    num_for_drafts = 0

    # ---- how many units there are

    @property
    @abstractmethod
    def limit(self) -> int:
        """Number of units that the kind may have now."""

    @property
    @abstractmethod
    def max_units(self) -> int:
        """Number of units that the kind may have at most."""

    @property
    @abstractmethod
    def num_free(self) -> int:
        """Number of units that requests could get now, cached ones included."""

    @property
    @abstractmethod
    def num_spare(self) -> int:
        """Number of units that are blank or useless."""

    @property
    def num_open(self) -> int:
        """Number of units whose memory is in arrays, which are copied if the limit falls below it."""
        return 0

    @abstractmethod
    def raise_limit(self, count: int) -> None:
        """Allow `count` more units."""

    @abstractmethod
    def lower(self, limit: int, running: Collection[LiveRequest]) -> Resize | None:
        """Lower the limit, as far as held units allow; return what the owner of the arrays has to do.

        `make_room` has made that many units spare. The tables of `running` requests may change.
        """

    # ---- what is reclaimed

    @abstractmethod
    def next_cost(self) -> float:
        """Return the cost of the next eviction of a unit that is not useless.

        In tokens to compute again, per full page of the freed bytes and per request ended since the last use.
        """

    @abstractmethod
    def make_room(self, count: int) -> None:
        """Make `count` units blank or useless, in the order of their cost."""

    def apply_dropped_ends(self) -> None:  # noqa: B027 (no other kind limits the use of most kinds)
        """Mark pages as useless that no sequence can continue from since other kinds dropped theirs."""

    def pop_dropped_ends(self) -> list[bytes]:
        """Return the hashes of the ends that were dropped since the last call."""
        return []

    def has_end(self, hash_: bytes) -> bool:  # noqa: ARG002
        """Return True if the page with this hash is an end: a sequence can continue after it."""
        return False

    def touch(self, hash_: bytes) -> None:  # noqa: B027 (no ends in most kinds)
        """Note that a waiting request will continue after the page with this hash."""

    def cheapest_leaf(self, is_free: Callable[[bytes], bool]) -> tuple[float, bytes] | None:  # noqa: ARG002
        """Return (cost, hash) of the cheapest end that no later end is known of; None if there is none.

        is_free: tells if the full page with a hash can be evicted
        """
        return None

    def drop_end(self, end: bytes) -> None:
        """Drop an end, by its hash."""
        raise KeyError(end)

    def next_dropped(self) -> list[tuple[bytes, int]]:
        """Return (hash, unit) of the units of the ends that will be dropped soon."""
        return []

    # ---- what requests need

    def max_growing(self, num_running: int) -> int:
        """Return the maximum number of units that so many running answers need next."""
        return num_running

    def num_growing(self, running: Collection[LiveRequest]) -> int:
        """Return the units that running requests need next; an upper bound if there are enough."""
        return self.max_growing(len(running))

    @abstractmethod
    def num_to_allocate(self, request: LiveRequest) -> int:
        """Return the number of units that a running prompt will allocate before it releases any."""

    @abstractmethod
    def num_at_begin(self, request: LiveRequest, cached: Sequence[int]) -> int:
        """Return the free units that a waiting request takes if it begins after these full pages.

        Cached units that are free count as well.
        """


class PageReclaimer(Reclaimer):
    """The pages of one pool."""

    pool: PagePool

    @property
    def limit(self) -> int:
        return self.pool.blank.limit

    @property
    def max_units(self) -> int:
        return self.pool.num_pages

    @property
    def num_free(self) -> int:
        return self.pool.num_free

    @property
    def num_spare(self) -> int:
        return self.pool.num_spare

    @property
    def num_open(self) -> int:
        return self.pool.blank.num_open

    def raise_limit(self, count: int) -> None:
        self.pool.blank.limit += count

    def lower(self, limit: int, running: Collection[LiveRequest]) -> Resize:
        fixed = {page for each in running if each.loading for page in self.table(each)}
        targets = self.pool.lower(limit, fixed)
        for request in running:
            if max(self.named(request), default=-1) >= self.limit:
                self.rename(request, targets)
        return Resize(self.name, self.limit, list(targets), list(targets.values()))

    def num_growing(self, running: Collection[LiveRequest]) -> int:
        if len(running) <= self.pool.num_free:
            return len(running)
        page_size = self.pool.page_size
        return sum(
            request.num_computed >= len(request.page_table) * page_size for request in running
        )

    @abstractmethod
    def table(self, request: LiveRequest) -> PageTable:
        """Return the pages that the request holds."""

    @abstractmethod
    def named(self, request: LiveRequest) -> PageTable:
        """Return the page ids in the request's table, whether it holds these pages or not."""

    @abstractmethod
    def rename(self, request: LiveRequest, targets: Mapping[int, int]) -> None:
        """Replace the page ids in the request's table by their `targets`."""


class FullPageReclaimer(PageReclaimer):
    """The full pages, which are evicted one by one, least recently used first.

    Where other kinds limit how much of a prefix is usable, whole conversations are dropped with their ends.
    """

    def __init__(self, pool: PagePool, name: str, others: Sequence[Reclaimer] = ()) -> None:
        self.pool = pool
        self.name = name
        self._others = others

    def next_cost(self) -> float:
        order = self.pool.order
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
        self.apply_dropped_ends()
        while count > self.num_spare and (cheapest := self._cheapest()) is not None:
            _, end, other = cheapest
            other.drop_end(end)
            self.apply_dropped_ends()

    def _cheapest(self) -> tuple[float, bytes, Reclaimer] | None:
        leaves = [(other.cheapest_leaf(self._is_free), other) for other in self._others]
        costs = [(*leaf, other) for leaf, other in leaves if leaf is not None]
        return min(costs, key=lambda cost: cost[0], default=None)

    def _is_free(self, hash_: bytes) -> bool:
        return self.pool.order.is_evictable(self.pool.index.find(hash_))

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
            if index.is_shared(parent) or self._has_end(parent) or not self._is_free(parent):
                break
            page = index.page_of(parent)
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

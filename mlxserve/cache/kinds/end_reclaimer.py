"""EndReclaimer: the units of a kind that sequences continue from, reclaimed end by end, the cheapest first."""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Callable
from math import inf

from mlxserve.cache.ends import End, Ends
from mlxserve.cache.kinds.reclaim import Reclaimer
from mlxserve.cache.pages import PagePool
from mlxserve.request import LiveRequest

_MAX_DROPPED = 256  # dropped ends that are remembered for the next `pop_dropped_ends`


class EndReclaimer(Reclaimer):
    """The ends of one kind: windows, or recurrent states."""

    pool: PagePool  # the pages whose hashes identify the units, and which count the time

    def __init__(self) -> None:
        self._ends = Ends()
        self._dropped: deque[bytes] = deque(maxlen=_MAX_DROPPED)  # ends that were dropped
        self._version = 0  # counts changes of the ends
        self._memo: dict[
            int, list[tuple[float, bytes]]
        ] = {}  # by their number, as long as nothing changes
        self._memo_key: tuple[int, int, int] | None = None
        self._continued: dict[LiveRequest, bytes] = {}  # the end that a request continued from

    def has_end(self, hash_: bytes) -> bool:
        return hash_ in self._ends

    def pop_dropped_ends(self) -> list[bytes]:
        dropped = list(self._dropped)
        self._dropped.clear()
        return dropped

    # ---- requests

    def begin(self, request: LiveRequest, hash_: bytes) -> None:
        """Record that a request continues after the page with this hash."""
        self._ends.use(hash_, self.pool.order.clock)
        self._version += 1
        self._continued[request] = hash_

    def touch(self, hash_: bytes) -> None:
        self._ends.touch(hash_, self.pool.order.clock)
        self._version += 1

    def finish(self, request: LiveRequest, last: bytes | None) -> None:
        """End a request, and mark the end it continued from as passed if it has left a later one.

        last: hash of its last page
        """
        continued = self._continued.pop(request, None)
        if continued is not None and last not in (None, continued) and last in self._ends:
            self._version += 1
            self._ends.pass_by(continued)

    # ---- costs

    def next_cost(self) -> float:
        cheapest = self._cheapest()
        return inf if cheapest is None else cheapest[0]

    def _cheapest(self) -> tuple[float, bytes] | None:
        return next(iter(self._first(1)), None)

    def _first(self, count: int) -> list[tuple[float, bytes]]:
        """Return (cost, hash) of up to `count` ends, the cheapest first."""
        clock = self.pool.order.clock
        key = self._version, clock, self.pool.num_free
        if self._memo_key != key:
            self._memo_key = key
            self._memo.clear()
        if (first := self._memo.get(count)) is None:
            first = self._ends.first_by_cost(count, clock, self._num_freed, self._least)
            self._memo[count] = first
        return first

    @abstractmethod
    def _num_freed(self, hash_: bytes, end: End, is_leaf: bool) -> float:
        """Return what dropping an end frees, in full pages; 0 if it frees no unit of this kind."""

    @abstractmethod
    def _num_own(self, end: End) -> int:
        """Return the units that dropping an end frees."""

    def cheapest_leaf(self, is_free: Callable[[bytes], bool]) -> tuple[float, bytes] | None:
        def num_freed(hash_: bytes, end: End, is_leaf: bool) -> float:
            if not is_leaf or not is_free(hash_):
                return 0
            return self._num_own(end) * self.weight + self._num_leading(end)

        return self._ends.cheapest(self.pool.order.clock, num_freed, self._least)

    @property
    def _least(self) -> float:
        """Minimum tokens that an end saves for each full page's bytes.

        An end frees at most one unit and one full page for each page by which it is later than the end
        before it.
        """
        # A little less, as costs are rounded.
        return 0.999 * self.pool.page_size / (1 + self.weight)

    def _num_leading(self, end: End) -> float:
        """Return how many full pages lead to this end, but to no earlier one."""
        return self._ends.num_saved(end) / self.pool.page_size

    # ---- dropped ends

    def drop_end(self, end: bytes) -> None:
        """Drop an end, whose units are reclaimed next, but for those that another end has."""
        self._reclaim(self._ends.drop(end))
        self._dropped.append(end)
        self._version += 1

    @abstractmethod
    def _reclaim(self, hashes: list[bytes]) -> None:
        """Reclaim the units with these hashes, which no end has any more."""

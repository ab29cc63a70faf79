"""StateEnds: the recurrent states that conversations can continue from, and which of them is dropped first.

Knows ids only: the runner owns the arrays, and keeps and drops them by these ids.

    lost       the page before the state was evicted: it is not found until that is computed again
    usual      dropped by their cost (`Ends`)
    kept       the page is protected for some time
    pinned     the end of a named prefix: dropped for what running requests need, and for nothing else
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence, ValuesView
from enum import IntEnum
from math import inf

from mlxserve.cache.ends import End
from mlxserve.cache.kinds.end_reclaimer import EndReclaimer
from mlxserve.cache.kinds.kind import UnitEvents
from mlxserve.cache.kinds.reclaim import Resize
from mlxserve.cache.kinds.state_names import StateNames
from mlxserve.cache.pages import PagePool
from mlxserve.core.stats import StateStats
from mlxserve.request import STATE_SLOTS, LiveRequest

PROMPT_STATES = 2  # snapshots that a prompt takes: one for itself, and one for the next turn
_LAST = 2.0  # as likely as the newest turn of a conversation is a state that is about to be kept


class Worth(IntEnum):
    """The order in which states are dropped, whatever they cost."""

    USUAL = 1
    KEPT = 2
    PINNED = 3


class StateEnds(EndReclaimer):
    """The findable states, by the hash of the page before them, in slots that other kinds may have.

    `names` tells which states requests begin with, and which ones can be dropped.
    """

    name = "states"
    min_units = STATE_SLOTS
    weight = 100.0  # of most models; `Balance` knows better where memory is shared

    def __init__(
        self,
        num_slots: int,
        pool: PagePool,
        stats: StateStats,
        num_held: Callable[[], int],
        events: UnitEvents | None = None,
    ) -> None:
        """Begin empty, with all slots.

        pool: full pages, whose hashes identify the states
        num_held: returns the slots that running requests and planned states take
        events: what findable states are reported to
        """
        super().__init__()
        self.pool = pool
        self.events = events
        if events is not None:
            events.units_cleared(self.name)
        self._stats = stats
        self._num_slots = num_slots
        self._num_held = num_held
        self._ids: dict[bytes, int] = {}
        self.names = StateNames()
        self._num_evicted = 0  # pages, when all states were last seen to follow a cached one
        self.initial_units = min(num_slots, 2 * STATE_SLOTS + PROMPT_STATES)
        self.has = self._ids.__contains__
        self.id_of = self._ids.__getitem__
        stats.num_snapshots, stats.num_slots = 0, num_slots

    def __len__(self) -> int:
        return len(self._ids)

    def ids(self) -> ValuesView[int]:
        """Return the ids of the findable states."""
        return self._ids.values()

    # ---- slots

    @property
    def limit(self) -> int:
        return self._stats.num_slots

    @property
    def max_units(self) -> int:
        return self._num_slots

    @property
    def num_free(self) -> int:
        return self.limit - self._num_held()

    @property
    def num_spare(self) -> int:
        return self.num_free - len(self._ids)

    def raise_limit(self, count: int) -> None:
        self._stats.num_slots += count

    def lower(self, limit: int, running: Collection[LiveRequest]) -> Resize | None:  # noqa: ARG002
        self._stats.num_slots = max(limit, self._num_held() + len(self._ids))
        dropped = self.names.pop_dropped()
        return Resize(self.name, self.limit, dropped=dropped) if dropped else None

    # ---- states come and go

    def restore(self, request: LiveRequest, hash_: bytes) -> None:
        """Let the next chunk of a request begin with the state after this page."""
        self.begin(request, hash_)
        self.names.restore(request, self._ids[hash_])
        self._stats.num_restored += 1

    def add(self, path: Sequence[bytes] | None, id_: int) -> None:
        """Make a state findable, unless it is known, or a token of its last page was dropped (None).

        path: hashes of all pages before it
        """
        if path is None or path[-1] in self._ids:
            self.names.drop(id_)
            return
        self._ids[path[-1]] = id_
        if self.events is not None:
            self.events.unit_stored(self.name, path[-1])
        self._stats.num_snapshots = len(self._ids)
        num_tokens, clock = len(path) * self.pool.page_size, self.pool.order.clock
        self._ends.add(path[-1:], num_tokens, clock, self._ends.last_before(path))
        self._version += 1

    def stop(self, request: LiveRequest, path: Sequence[bytes]) -> None:
        """End a request, which has the pages with these hashes."""
        self.names.pop_restored(request)
        last = path[-1] if path and path[-1] in self._ids else self._ends.last_before(path)
        self.finish(request, last)

    def last_end(self, path: Sequence[bytes]) -> int:
        """Return how many of these pages lead to a state that is kept."""
        return next((end for end in range(len(path), 0, -1) if path[end - 1] in self._ids), 0)

    # ---- what is dropped

    def make_room(self, count: int) -> None:
        while count > self.num_spare and self._drop_one(inf, Worth.PINNED):
            pass

    def make_room_for(self, num_tokens: float) -> bool:
        """Make a slot spare for a state that will save `num_tokens`; False if others save more."""
        value = num_tokens * _LAST / self.weight
        while self.num_spare <= 0:
            if not self._drop_one(value, Worth.KEPT):
                return False
        return True

    def make_room_for_drafts(self, count: int, num_left: int) -> int:
        """Make up to `count` slots spare for states after drafted tokens; return how many there are.

        num_left: slots that stay free, or keep the states that cost most; protected ones are not dropped
        """
        count = min(count, self.num_free - num_left)
        while self.num_spare < count and self._drop_one(inf, Worth.USUAL):
            pass
        return max(0, min(count, self.num_spare))

    def _drop_one(self, max_cost: float, max_worth: Worth) -> bool:
        """Drop the states that are lost, or else the cheapest one. False if none may be dropped."""
        if self._drop_newly_lost():
            return True
        cheapest = self._cheapest()
        if cheapest is not None:
            if cheapest[0] > max_cost:
                return False
            self.drop_end(cheapest[1])
            return True
        # Only protected ones are left.
        victim = min(self._ids, key=self._worth, default=None)
        if victim is None or self._worth(victim) > max_worth:
            return False
        self.drop_end(victim)
        return True

    def _drop_newly_lost(self) -> bool:
        """Drop the lost states, if pages were evicted since the last call; True if any were."""
        if self._num_evicted == self.pool.evictions.count:
            return False
        self._num_evicted = self.pool.evictions.count
        return self.drop_lost()

    def drop_lost(self) -> bool:
        """Drop the states after pages that are not cached any more; True if there were any."""
        lost = [hash_ for hash_ in self._ids if not self.pool.index.is_known(hash_)]
        for hash_ in lost:
            self.drop_end(hash_)
        return bool(lost)

    def _reclaim(self, hashes: list[bytes]) -> None:
        self.names.drop(*map(self._ids.pop, hashes))
        if self.events is not None:
            for hash_ in hashes:
                self.events.unit_removed(self.name, hash_)
        self._stats.num_snapshots = len(self._ids)
        self._stats.num_evicted += len(hashes)

    def change_protection(self) -> None:
        """Note that pages were protected, or are not any more."""
        self._version += 1

    def next_dropped(self) -> list[tuple[bytes, int]]:
        missing = STATE_SLOTS + PROMPT_STATES - self.num_spare
        if missing <= 0:
            return []
        return [(end, self._ids[end]) for _, end in self._first(missing)]

    # ---- costs

    def _num_freed(self, hash_: bytes, end: End, is_leaf: bool) -> float:
        if self._worth(hash_) is not Worth.USUAL:
            return 0
        is_free = is_leaf and self.pool.order.is_evictable(self.pool.index.find(hash_))
        return self.weight + (self._num_leading(end) if is_free else 0)

    def _num_own(self, end: End) -> int:  # noqa: ARG002
        return 1

    def _worth(self, hash_: bytes) -> Worth:
        if self.pool.is_pinned(hash_):
            return Worth.PINNED
        is_kept = self.pool.order.is_kept(self.pool.index.find(hash_))
        return Worth.KEPT if is_kept else Worth.USUAL

    # ---- shared memory

    def max_growing(self, num_running: int) -> int:  # noqa: ARG002
        return 0  # a running request has its slots

    def num_to_allocate(self, request: LiveRequest) -> int:
        return PROMPT_STATES if request.num_computed < request.prefill_end else 0

    def num_at_begin(self, request: LiveRequest, cached: Sequence[int]) -> int:  # noqa: ARG002
        return STATE_SLOTS + PROMPT_STATES

    def check(self, holders: Collection[LiveRequest]) -> None:
        """Audit the invariants. Raises AssertionError."""
        self._ends.check()
        assert set(self._ends) == self._ids.keys(), "a state is kept, but is no end"
        assert len(set(self._ids.values())) == len(self._ids), "a state has two names"
        assert self._continued.keys() <= set(holders), "an ended request goes on from an end"
        assert self.names.restoring.keys() <= set(holders), "an ended request begins with a state"
        assert self._num_held() <= self.limit <= self._num_slots, "there are more states than slots"

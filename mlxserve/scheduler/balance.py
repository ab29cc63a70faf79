"""Balance: moves memory between the pages of several kinds, at the beginning of a plan.

    full pages    0 ............ limit ──▶ num_pages          the units below the limits never have more
    window pages  0 .. limit ──▶ num_pages                    bytes than the memory that the kinds share
    states        0 .. limit ──▶ num_slots

A kind that has too few blank or useless units takes units of another kind that cost less: blank or useless ones, or
those that take fewer tokens per byte to compute again, divided by the time since their last use. A unit that a request
needs to begin or to continue is taken at any cost but that of other running requests.

Within a plan the limits stay, so whoever counts free units counts those of one kind. Only blank page ids can be closed:
what is above the new limit and stays moves below it, which changes the page tables of running requests. So no step may
be unread then. The engine gives the arrays their new sizes, and drops states, before the step is launched.
"""

from __future__ import annotations

from typing import NamedTuple

from mlxserve.cache.kinds.reclaim import Reclaimer, Resize
from mlxserve.cache.pool_memory import PoolMemory
from mlxserve.request import RequestState
from mlxserve.scheduler.admission import Admission
from mlxserve.scheduler.page_tables import PageTables
from mlxserve.scheduler.roster import Roster

# How many times cheaper the pages of another kind must be: resizing copies arrays.
_MARGIN = 1.5
# A kind gives up to an eighth of its pages at once, if they are useless.
_AT_ONCE = 8


class _Transfer(NamedTuple):
    """A move of memory: `taker` gets `num_units` units, and `giver` gives as many bytes, but at most `max_given` units."""

    giver: Reclaimer
    taker: Reclaimer
    num_units: int
    max_given: int


class Balance:
    """Divides memory between the kinds of one scheduler that share it."""

    def __init__(
        self, memory: PoolMemory, tables: PageTables, roster: Roster, admission: Admission
    ) -> None:
        self.memory = memory
        self._tables = tables
        self._roster = roster
        self._admission = admission
        reclaimers = [kind.reclaimer for kind in tables.kinds if kind.reclaimer is not None]
        self._kinds = [kind for kind in reclaimers if kind.name in memory.page_bytes]
        self._resizes: list[Resize] = []
        self.has_prompts = False  # True if prompts were running at the last plan
        full, *others = self._kinds
        for kind in others:
            kind.weight = self._bytes(kind) / self._bytes(full)
        left = memory.nbytes - sum(kind.min_units * self._bytes(kind) for kind in self._kinds)
        for kind in others:
            most = kind.min_units + max(0, left) // self._bytes(kind)
            self._lower(kind, min(kind.initial_units, most))
            left -= (kind.limit - kind.min_units) * self._bytes(kind)
        left += full.min_units * self._bytes(full)
        self._lower(full, min(full.max_units, left // self._bytes(full)))
        assert self._num_left >= 0, "not even one request would go on"

    def _bytes(self, kind: Reclaimer) -> int:
        return self.memory.page_bytes[kind.name]

    @property
    def _num_left(self) -> int:
        """Number of bytes that no kind has."""
        return self.memory.nbytes - sum(kind.limit * self._bytes(kind) for kind in self._kinds)

    def pop_resizes(self) -> list[Resize]:
        """Return the resizes since the last call, in order."""
        resizes, self._resizes = self._resizes, []
        return resizes

    def is_wanted(self, now: int) -> bool:
        """Return True if memory would move before plan number `now`, with no step unread."""
        return self._next_transfer(now) is not None

    def run(self, now: int) -> bool:
        """Move memory for plan number `now`; return True if any moved. No step may be unread."""
        assert not self._tables.num_unread, "an unread step uses pages"
        for kind in self._kinds:
            kind.apply_dropped_ends()
        self._touch_next(now)
        num_moved, max_moves = 0, len(self._kinds) * (len(self._kinds) - 1)
        while num_moved < max_moves and (transfer := self._next_transfer(now)) is not None:
            self._tables.release_unused()
            self._move(transfer)
            num_moved += 1
        return num_moved > 0

    def check(self) -> None:
        """Audit the invariants. Raises AssertionError."""
        assert self._num_left >= 0, "the kinds have more memory than they share"
        for kind in self._kinds:
            assert kind.limit >= kind.min_units, f"not even one request goes on: {kind.name}"

    # ---- decisions

    def _next_transfer(self, now: int) -> _Transfer | None:
        """Return the next transfer; None if no kind needs memory, or none can give it."""
        if self._is_at_rest():
            return None
        transfer, running = self._transfer_for_starved(), self._roster.running.values()
        for taker in self._kinds if transfer is None else ():
            num_wanted = self._num_wanted(taker, now)
            if taker.num_spare >= num_wanted:
                continue
            num_missing = taker.num_growing(running) - taker.num_free
            for giver in self._kinds:
                if giver is taker or transfer is not None:
                    continue
                if num_missing > 0:
                    wanted, max_given = num_missing, giver.num_free - self._num_needed_soon(giver)
                else:
                    wanted = num_wanted - taker.num_spare
                    max_given = self._num_cheaper(giver, taker) - self._num_wanted(giver, now)
                count = self._count(giver, taker, wanted, max_given)
                if count > 0:
                    transfer = _Transfer(giver, taker, count, self._most_given(giver, max_given))
        return transfer

    def _is_at_rest(self) -> bool:
        """Return True if only answers run, and each kind has spare pages for them."""
        num_running = len(self._roster.running)
        if self.has_prompts or self._roster.waiting.num_queued:
            return False
        return all(
            kind.num_spare >= kind.max_growing(num_running) + kind.num_for_drafts
            for kind in self._kinds
        )

    def _transfer_for_starved(self) -> _Transfer | None:
        """Return a transfer with which the request that lacked memory in the last plan can begin."""
        request = self._admission.starved
        if request is None or request.state is not RequestState.WAITING:
            return None
        cached = self._tables.cache.match(request)
        lacking = {self._kinds[0].name: self._admission.num_lacking(request, cached)}
        lacking |= {end.name: num for end, num in self._admission.lacking(request, cached).items()}
        takers = [kind for kind in self._kinds if lacking[kind.name] > 0]
        given = {
            kind: self._most_given(kind, -lacking[kind.name])
            for kind in self._kinds
            if kind not in takers
        }
        needed = sum(lacking[kind.name] * self._bytes(kind) for kind in takers)
        left = self._num_left + sum(given[kind] * self._bytes(kind) for kind in given)
        has_ids = all(lacking[kind.name] <= kind.max_units - kind.limit for kind in takers)
        if not takers or not given or needed > left or not has_ids:
            return None
        taker, giver = takers[0], max(given, key=lambda kind: given[kind] * self._bytes(kind))
        return _Transfer(giver, taker, lacking[taker.name], given[giver])

    def _touch_next(self, now: int) -> None:
        """Mark the end as used that the next waiting request will continue from: no room is made of it."""
        if not self._roster.waiting.num_queued:
            return
        request = next(iter(self._roster.waiting.in_order(now)))
        if cached := self._tables.cache.match(request):
            for kind in self._kinds:
                kind.touch(request.page_hashes[len(cached) - 1])

    def _num_wanted(self, kind: Reclaimer, now: int) -> int:
        """Return the number of units that the next plan will probably allocate."""
        running, waiting = self._roster.running, self._roster.waiting
        num_wanted = self._num_needed_soon(kind) + kind.num_for_drafts
        if waiting.num_queued and len(running) < self._admission.max_running:
            request = next(iter(waiting.in_order(now)))
            num_wanted += max(0, kind.num_at_begin(request, self._tables.cache.match(request)))
        return num_wanted

    def _num_needed_soon(self, kind: Reclaimer) -> int:
        """Return the number of free units that running requests will allocate soon."""
        running = self._roster.running.values()
        prompts = [request for request in running if request.num_computed < request.prefill_end]
        return kind.max_growing(len(running)) + sum(map(kind.num_to_allocate, prompts))

    def _num_cheaper(self, giver: Reclaimer, taker: Reclaimer) -> int:
        """Return how many units of the giver cost less than those that the taker would evict."""
        is_cheaper = giver.next_cost() * _MARGIN < taker.next_cost()
        return giver.num_free if is_cheaper else giver.num_spare

    def _count(self, giver: Reclaimer, taker: Reclaimer, count: int, max_given: int) -> int:
        """Return how many of `count` units the taker can have if the giver gives at most `max_given`."""
        count = min(count, taker.max_units - taker.limit)
        nbytes = self._most_given(giver, max_given) * self._bytes(giver) + self._num_left
        return max(0, min(count, nbytes // self._bytes(taker)))

    @staticmethod
    def _most_given(giver: Reclaimer, max_given: int) -> int:
        """Return how many of `max_given` units the giver can give: it keeps its minimum."""
        return max(0, min(max_given, giver.limit - giver.min_units))

    # ---- transfers

    def _move(self, transfer: _Transfer) -> None:
        giver, taker, count, max_given = transfer
        wanted = count * self._bytes(taker) - self._num_left
        if wanted > 0:
            self._give(giver, min(max_given, -(-wanted // self._bytes(giver))))
        count = min(self._num_left // self._bytes(taker), taker.max_units - taker.limit)
        taker.raise_limit(count)

    def _give(self, giver: Reclaimer, count: int) -> None:
        if giver.limit - count < giver.num_open:
            # Resizing copies the arrays: give more at once if these pages are useless.
            num_useless = giver.num_spare - self._num_needed_soon(giver)
            count = max(count, min(num_useless // 2, giver.limit // _AT_ONCE))
        limit = max(giver.min_units, giver.limit - count)
        giver.make_room(giver.limit - limit)
        self._lower(giver, limit)

    def _lower(self, giver: Reclaimer, limit: int) -> None:
        resize = giver.lower(limit, self._roster.running.values())
        if resize is not None:
            self._resizes.append(resize)

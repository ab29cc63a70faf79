"""Balance: moves memory between the pages of several kinds, at the beginning of a plan.

    full pages    0 ............ limit ──▶ num_pages          the pages below the limits never have more
    window pages  0 .. limit ──▶ num_pages                    bytes than the memory that the kinds share

A kind that has too few blank or useless pages takes pages of another kind that cost less: blank or useless ones, or
those that take fewer tokens per byte to compute again, divided by the time since their last use. A page that a request
needs to begin or to continue is taken at any cost but that of other running requests.

Within a plan the limits stay, so whoever counts free pages counts those of one kind. Only blank ids can be closed: what
is above the new limit and stays moves below it, which changes the page tables of running requests. So no step may be
unread then. The engine gives the arrays their new sizes before the step is launched.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mlxserve.cache.kinds.reclaim import Reclaimer
from mlxserve.cache.pool_memory import PoolMemory
from mlxserve.request import RequestState
from mlxserve.scheduler.admission import Admission
from mlxserve.scheduler.page_tables import PageTables
from mlxserve.scheduler.roster import Roster

# How many times cheaper the pages of another kind must be: resizing copies arrays.
_MARGIN = 1.5
# A kind gives up to an eighth of its pages at once, if they are useless.
_AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class Resize:
    """A change of a kind's arrays: copy `sources` to `targets`, then shrink to `num_pages` pages."""

    kind: str
    sources: Sequence[int]
    targets: Sequence[int]
    num_pages: int


class _Transfer(NamedTuple):
    """A move of memory: `taker` gets `num_pages`, and `giver` gives as many bytes."""

    giver: Reclaimer
    taker: Reclaimer
    num_pages: int


class Balance:
    """Divides memory between the kinds of one scheduler whose units are pages."""

    def __init__(
        self, memory: PoolMemory, tables: PageTables, roster: Roster, admission: Admission
    ) -> None:
        self.memory = memory
        self._tables = tables
        self._roster = roster
        self._admission = admission
        self._kinds = [kind.reclaimer for kind in tables.kinds if kind.reclaimer is not None]
        self._resizes: list[Resize] = []
        self.has_prompts = False  # True if prompts were running at the last plan
        full, *others = self._kinds
        for kind in others:
            kind.weight = self._bytes(kind) / self._bytes(full)
        left = memory.nbytes - full.min_pages * self._bytes(full)
        for kind in others:
            max_pages = max(kind.min_pages, left // self._bytes(kind))
            self._lower(kind, min(kind.initial_pages, max_pages))
            left -= kind.pool.blank.limit * self._bytes(kind)
        left += full.min_pages * self._bytes(full)
        self._lower(full, min(full.pool.num_pages, left // self._bytes(full)))
        assert self._num_left >= 0, "not even one request would go on"

    def _bytes(self, kind: Reclaimer) -> int:
        return self.memory.page_bytes[kind.name]

    @property
    def _num_left(self) -> int:
        """Number of bytes that no kind has."""
        return self.memory.nbytes - sum(
            kind.pool.blank.limit * self._bytes(kind) for kind in self._kinds
        )

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
        num_moved = 0
        while num_moved < len(self._kinds) and (transfer := self._next_transfer(now)) is not None:
            self._tables.release_unused()
            self._move(transfer)
            num_moved += 1
        return num_moved > 0

    def check(self) -> None:
        """Audit the invariants. Raises AssertionError."""
        assert self._num_left >= 0, "the kinds have more memory than they share"
        for kind in self._kinds:
            assert kind.pool.blank.limit >= kind.min_pages, (
                f"not even one request goes on: {kind.name}"
            )

    # ---- decisions

    def _next_transfer(self, now: int) -> _Transfer | None:
        """Return the next transfer; None if no kind needs memory, or none can give it."""
        if self._is_at_rest():
            return None
        transfer = self._transfer_for_starved()
        for taker in self._kinds if transfer is None else ():
            num_wanted = self._num_wanted(taker, now)
            if taker.pool.num_spare >= num_wanted:
                continue
            num_missing = self._num_growing(taker) - taker.pool.num_free
            for giver in self._kinds:
                if giver is taker or transfer is not None:
                    continue
                if num_missing > 0:
                    max_given = giver.pool.num_free - self._num_needed_soon(giver)
                    count = self._count(giver, taker, num_missing, max_given)
                else:
                    max_given = self._num_cheaper(giver, taker) - self._num_wanted(giver, now)
                    count = self._count(giver, taker, num_wanted - taker.pool.num_spare, max_given)
                if count > 0:
                    transfer = _Transfer(giver, taker, count)
        return transfer

    def _is_at_rest(self) -> bool:
        """Return True if only answers run, and each kind has spare pages for them."""
        running = self._roster.running
        if self.has_prompts or self._roster.waiting.num_queued:
            return False
        return all(kind.pool.num_spare >= len(running) for kind in self._kinds)

    def _transfer_for_starved(self) -> _Transfer | None:
        """Return a transfer with which the request that lacked memory in the last plan can begin."""
        request = self._admission.starved
        if request is None or request.state is not RequestState.WAITING:
            return None
        cached = self._tables.cache.match(request)
        lacking = {self._kinds[0].name: self._admission.num_lacking(request, cached)}
        lacking |= {end.name: num for end, num in self._admission.lacking(request, cached).items()}
        for taker in self._kinds:
            for giver in self._kinds if lacking[taker.name] > 0 else ():
                wanted, max_given = lacking[taker.name], -lacking[giver.name]
                if max_given > 0 and self._count(giver, taker, wanted, max_given) == wanted:
                    return _Transfer(giver, taker, wanted)
        return None

    def _num_growing(self, kind: Reclaimer) -> int:
        """Return the pages that running requests need next; an upper bound if there are enough."""
        running = self._roster.running
        if len(running) <= kind.pool.num_free:
            return len(running)
        page_size = kind.pool.page_size
        return sum(
            request.num_computed >= len(request.page_table) * page_size
            for request in running.values()
        )

    def _num_wanted(self, kind: Reclaimer, now: int) -> int:
        """Return the number of pages that the next plan will probably allocate."""
        running, waiting = self._roster.running, self._roster.waiting
        num_wanted = self._num_needed_soon(kind)
        if waiting.num_queued and len(running) < self._admission.max_running:
            request = next(iter(waiting.in_order(now)))
            num_wanted += max(0, kind.num_at_begin(request, self._tables.cache.match(request)))
        return num_wanted

    def _num_needed_soon(self, kind: Reclaimer) -> int:
        """Return the number of free pages that running requests will allocate soon."""
        running = self._roster.running.values()
        prompts = [request for request in running if request.num_computed < request.prefill_end]
        return len(running) + sum(map(kind.num_to_allocate, prompts))

    def _num_cheaper(self, giver: Reclaimer, taker: Reclaimer) -> int:
        """Return how many pages of the giver cost less than those that the taker would evict."""
        is_cheaper = giver.next_cost() * _MARGIN < taker.next_cost()
        return giver.pool.num_free if is_cheaper else giver.pool.num_spare

    def _count(self, giver: Reclaimer, taker: Reclaimer, count: int, max_given: int) -> int:
        """Return how many of `count` pages the taker can have if the giver gives at most `max_given`."""
        count = min(count, taker.pool.num_pages - taker.pool.blank.limit)
        max_given = max(0, min(max_given, giver.pool.blank.limit - giver.min_pages))
        nbytes = max_given * self._bytes(giver) + self._num_left
        return max(0, min(count, nbytes // self._bytes(taker)))

    # ---- transfers

    def _move(self, transfer: _Transfer) -> None:
        giver, taker, count = transfer
        wanted = count * self._bytes(taker) - self._num_left
        if wanted > 0:
            self._give(giver, -(-wanted // self._bytes(giver)))
        blank = taker.pool.blank
        blank.limit += min(self._num_left // self._bytes(taker), taker.pool.num_pages - blank.limit)

    def _give(self, giver: Reclaimer, count: int) -> None:
        blank = giver.pool.blank
        if blank.limit - count < blank.num_open:
            # Resizing copies the arrays: give more at once if these pages are useless.
            num_useless = giver.pool.num_spare - self._num_needed_soon(giver)
            count = max(count, min(num_useless // 2, blank.limit // _AT_ONCE))
        limit = max(giver.min_pages, blank.limit - count)
        giver.make_room(blank.limit - limit)
        self._lower(giver, limit)

    def _lower(self, giver: Reclaimer, limit: int) -> None:
        running = self._roster.running.values()
        fixed = {page for each in running if each.loading for page in giver.table(each)}
        targets = giver.pool.lower(limit, fixed)
        for request in running:
            if max(giver.named(request), default=-1) >= giver.pool.blank.limit:
                giver.rename(request, targets)
        moved = list(targets), list(targets.values())
        self._resizes.append(Resize(giver.name, *moved, giver.pool.blank.limit))

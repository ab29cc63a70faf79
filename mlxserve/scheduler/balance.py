"""Balance: moves memory between the pages of several kinds, at the beginning of a plan.

    full pages    0 ............ limit ──▶ num_pages          limits times bytes of a page are never more
    window pages  0 .. limit ──▶ num_pages                    than the memory that the kinds share

A kind that needs more than it has without loss takes pages of another kind that cost less: that are blank or of no
use, or that would take fewer tokens a byte to compute again, for how long ago they were used. What a request cannot
begin or go on without, it gets at any cost but that of other running requests.

Within a plan the limits stay, so whoever counts free pages counts those of one kind. Only blank ids can be closed: what
is above the new limit and stays moves below it, which changes the page tables of running requests. So no step may be
unread then. The engine gives the arrays their new sizes before the step is launched.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mlxserve.cache.kinds.lending import Lending
from mlxserve.cache.pool_memory import PoolMemory
from mlxserve.request import RequestState
from mlxserve.scheduler.admission import Admission
from mlxserve.scheduler.page_tables import PageTables
from mlxserve.scheduler.roster import Roster

# Times by which pages of another kind must be cheaper: arrays that have another size are copied.
_MARGIN = 1.5
_AT_ONCE = 8  # one in: of the pages of a kind, those that it gives at once where they are of no use


@dataclass(frozen=True, slots=True)
class Resize:
    """What the engine does with the arrays of a kind: copy pages, then have memory for `num_pages` at most."""

    kind: str
    sources: Sequence[int]
    targets: Sequence[int]
    num_pages: int


class _Transfer(NamedTuple):
    """`num_pages` that `taker` gets, for which `giver` gives as many bytes."""

    giver: Lending
    taker: Lending
    num_pages: int


class Balance:
    """Over the kinds of one scheduler whose units are pages."""

    def __init__(
        self, memory: PoolMemory, tables: PageTables, roster: Roster, admission: Admission
    ) -> None:
        self.memory = memory
        self._tables = tables
        self._roster = roster
        self._admission = admission
        self._kinds = [kind.lending for kind in tables.kinds if kind.lending is not None]
        self._resizes: list[Resize] = []
        self.has_prompts = False  # whether the last plan had some, or left them for later
        full, *others = self._kinds
        for kind in others:
            kind.weight = self._bytes(kind) / self._bytes(full)
        left = memory.nbytes - full.num_fewest * self._bytes(full)
        for kind in others:
            most = max(kind.num_fewest, left // self._bytes(kind))
            self._lower(kind, min(kind.num_at_start, most))
            left -= kind.pool.blank.limit * self._bytes(kind)
        left += full.num_fewest * self._bytes(full)
        self._lower(full, min(full.pool.num_pages, left // self._bytes(full)))
        assert self._num_left >= 0, "not even one request would go on"

    def _bytes(self, kind: Lending) -> int:
        return self.memory.page_bytes[kind.name]

    @property
    def _num_left(self) -> int:
        """Bytes that no kind has."""
        return self.memory.nbytes - sum(
            kind.pool.blank.limit * self._bytes(kind) for kind in self._kinds
        )

    def pop_resizes(self) -> list[Resize]:
        """What happened since the last call, in order."""
        resizes, self._resizes = self._resizes, []
        return resizes

    def is_wanted(self, now: int) -> bool:
        """Whether memory moves before plan number `now`, if no step is unread then."""
        return self._next(now) is not None

    def run(self, now: int) -> bool:
        """Move memory where plan number `now` wants it; whether any was. No step may be unread."""
        assert not self._tables.num_unread, "an unread step uses pages"
        for kind in self._kinds:
            kind.settle()
        num_moved = 0
        while num_moved < len(self._kinds) and (transfer := self._next(now)) is not None:
            self._tables.release_unused()
            self._move(transfer)
            num_moved += 1
        return num_moved > 0

    def check(self) -> None:
        """Audit. Raises AssertionError."""
        assert self._num_left >= 0, "the kinds have more memory than they share"
        for kind in self._kinds:
            assert kind.pool.blank.limit >= kind.num_fewest, (
                f"not even one request goes on: {kind.name}"
            )

    # ---- decides

    def _next(self, now: int) -> _Transfer | None:
        """The next transfer; None if the kinds have what they need, or cannot get it."""
        if self._is_at_rest():
            return None
        transfer = self._for_starved()
        for taker in self._kinds if transfer is None else ():
            num_wanted = self._num_wanted(taker, now)
            if taker.num_spare >= num_wanted:
                continue
            num_missing = self._num_growing(taker) - taker.pool.num_free
            for giver in self._kinds:
                if giver is taker or transfer is not None:
                    continue
                if num_missing > 0:
                    most = giver.pool.num_free - self._num_own(giver)
                    count = self._count(giver, taker, num_missing, most)
                else:
                    most = self._num_cheaper(giver, taker) - self._num_wanted(giver, now)
                    count = self._count(giver, taker, num_wanted - taker.num_spare, most)
                if count > 0:
                    transfer = _Transfer(giver, taker, count)
        return transfer

    def _is_at_rest(self) -> bool:
        """Whether there are answers only, and pages for them that nobody misses."""
        running = self._roster.running
        if self.has_prompts or self._roster.waiting.num_queued:
            return False
        return all(kind.num_spare >= len(running) for kind in self._kinds)

    def _for_starved(self) -> _Transfer | None:
        """For the request that lacked memory in the last plan, if it begins with this."""
        request = self._admission.starved
        if request is None or request.state is not RequestState.WAITING:
            return None
        cached = self._tables.cache.match(request)
        lacking = {self._kinds[0].name: self._admission.num_lacking(request, cached)}
        lacking |= {end.name: num for end, num in self._admission.lacking(request, cached).items()}
        for taker in self._kinds:
            for giver in self._kinds if lacking[taker.name] > 0 else ():
                wanted, most = lacking[taker.name], -lacking[giver.name]
                if most > 0 and self._count(giver, taker, wanted, most) == wanted:
                    return _Transfer(giver, taker, wanted)
        return None

    def _num_growing(self, kind: Lending) -> int:
        """Pages that running requests need to go on; an upper bound where there are enough."""
        running = self._roster.running
        if len(running) <= kind.pool.num_free:
            return len(running)
        page_size = kind.pool.page_size
        return sum(
            request.num_computed >= len(request.page_table) * page_size
            for request in running.values()
        )

    def _num_wanted(self, kind: Lending, now: int) -> int:
        """Pages that the next plan probably takes."""
        running, waiting = self._roster.running, self._roster.waiting
        num_wanted = self._num_own(kind)
        if waiting.num_queued and len(running) < self._admission.max_running:
            request = next(iter(waiting.in_order(now)))
            num_wanted += max(0, kind.num_first(request, self._tables.cache.match(request)))
        return num_wanted

    def _num_own(self, kind: Lending) -> int:
        """Free pages that running requests will take soon."""
        running = self._roster.running.values()
        prompts = [request for request in running if request.num_computed < request.prefill_end]
        return len(running) + sum(map(kind.num_left, prompts))

    def _num_cheaper(self, giver: Lending, taker: Lending) -> int:
        """Pages of the giver that cost less than those that the taker would evict."""
        is_cheaper = giver.next_cost() * _MARGIN < taker.next_cost()
        return giver.pool.num_free if is_cheaper else giver.num_spare

    def _count(self, giver: Lending, taker: Lending, count: int, most: int) -> int:
        """How many of `count` pages the taker can have if the giver gives `most` at most."""
        count = min(count, taker.pool.num_pages - taker.pool.blank.limit)
        most = max(0, min(most, giver.pool.blank.limit - giver.num_fewest))
        nbytes = most * self._bytes(giver) + self._num_left
        return max(0, min(count, nbytes // self._bytes(taker)))

    # ---- moves

    def _move(self, transfer: _Transfer) -> None:
        giver, taker, count = transfer
        wanted = count * self._bytes(taker) - self._num_left
        if wanted > 0:
            self._give(giver, -(-wanted // self._bytes(giver)))
        blank = taker.pool.blank
        blank.limit += min(self._num_left // self._bytes(taker), taker.pool.num_pages - blank.limit)

    def _give(self, giver: Lending, count: int) -> None:
        blank = giver.pool.blank
        if blank.limit - count < blank.num_open:
            # Arrays are copied: so rather more at once, if that costs nothing.
            num_useless = giver.num_spare - self._num_own(giver)
            count = max(count, min(num_useless // 2, blank.limit // _AT_ONCE))
        limit = max(giver.num_fewest, blank.limit - count)
        giver.make_room(blank.limit - limit)
        self._lower(giver, limit)

    def _lower(self, giver: Lending, limit: int) -> None:
        running = self._roster.running.values()
        fixed = {page for one in running if one.loading for page in giver.table(one)}
        targets = giver.pool.lower(limit, fixed)
        for request in running:
            if max(giver.named(request), default=-1) >= giver.pool.blank.limit:
                giver.rename(request, targets)
        moved = list(targets), list(targets.values())
        self._resizes.append(Resize(giver.name, *moved, giver.pool.blank.limit))

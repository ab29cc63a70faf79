"""Resize: another number of pages between two steps, and what it means for those who use them.

    refused  ── nothing happened: the pins, or a live request, would not fit
    make room ─ requests whose pages are being read give them back; then victims, as in a shortage
    move     ── the pool hands out its last ids no more; page tables and copies follow the moves
    measure  ── how long each request can get

Decides and says which pages move; whoever has the arrays moves what they hold.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from mlxserve.cache.pages import PagePool
from mlxserve.errors import PrefixQuotaExceeded, QueueFull
from mlxserve.request import LiveRequest, Resized, check_num_pages
from mlxserve.scheduler.capacity import Capacity
from mlxserve.scheduler.copies import Copies
from mlxserve.scheduler.page_tables import PageTables
from mlxserve.scheduler.pins import Pins
from mlxserve.scheduler.prefix_cache import PrefixCache
from mlxserve.stats import SchedulerStats


@dataclass(frozen=True, slots=True)
class PoolResize:
    """What `Resized` tells users, and where pages went. Those who hold arrays move their content."""

    num_pages: int
    max_model_len: int
    num_preempted: int
    num_forgotten: int
    moves: Mapping[int, int]  # old page id -> new page id

    def public(self) -> Resized:
        """Without page ids, which mean nothing outside the engine."""
        return Resized(
            self.num_pages,
            self.max_model_len,
            self.num_preempted,
            self.num_forgotten,
            len(self.moves),
        )


class Resize:
    """Needs that no step is unread: nobody uses the pages that move."""

    def __init__(
        self,
        pool: PagePool,
        cache: PrefixCache,
        capacity: Capacity,
        pins: Pins,
        copies: Copies,
        page_tables: PageTables,
        stats: SchedulerStats,
    ) -> None:
        self._pool = pool
        self._cache = cache
        self._capacity = capacity
        self._pins = pins
        self._copies = copies
        self._page_tables = page_tables
        self._stats = stats

    def resize(self, num_pages: int, live: Collection[LiveRequest]) -> PoolResize:
        """Have so many pages. Raises InvalidParameter, PrefixQuotaExceeded and QueueFull; nothing
        happened then."""
        self._refuse(num_pages, live)
        preemptions, evicted = self._stats.num_preemptions, self._pool.num_evicted
        if num_pages < self._pool.num_pages:
            self._make_room(num_pages)
        moves = self._pool.resize(num_pages)
        self._follow(moves)
        self._capacity.measure_all(live)
        return PoolResize(
            num_pages,
            self._capacity.most,
            self._stats.num_preemptions - preemptions,
            self._pool.num_evicted - evicted,
            moves,
        )

    def _refuse(self, num_pages: int, live: Collection[LiveRequest]) -> None:
        check_num_pages(num_pages)
        quota = self._pins.quota_of(num_pages)
        if self._pins.num_pages > quota:
            raise PrefixQuotaExceeded(
                f"named prefixes have {self._pins.num_pages} pages, but of {num_pages} they may "
                f"have only {quota}. Remove a prefix, keep more pages, or raise "
                "max_pinned_fraction."
            )
        for request in live:
            capacity, num_tokens = self._capacity.of(request, num_pages), len(request.token_ids)
            # As where pins are promised: one for the next token, and one for the answer's end.
            if capacity < min(request.capacity, num_tokens + 2):
                raise QueueFull(
                    f"{num_pages} pages would leave {capacity} tokens for a request that has "
                    f"{num_tokens} and goes on. Keep more pages, abort it, or try again when it "
                    "has ended."
                )

    def _make_room(self, num_pages: int) -> None:
        for request in list(self._page_tables.running.values()):
            if request.loading:
                self._page_tables.requeue(request)
        while self._pool.num_used > num_pages:
            self._page_tables.preempt(self._page_tables.victim() or self._youngest())

    def _youngest(self) -> LiveRequest:
        """Of requests that share all their pages with each other, so that one alone frees none."""
        return next(reversed(self._page_tables.running.values()))

    def _follow(self, moves: Mapping[int, int]) -> None:
        self._cache.forget_all()
        self._copies.renumber(moves)
        for request in self._page_tables.running.values():
            self._page_tables.renumber(request, moves)

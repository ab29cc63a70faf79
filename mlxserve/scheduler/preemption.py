"""Preemption: takes the pages of one running request when another one cannot get a page.

grow ── a page is free ──▶ table grown
  └──── none is, and the step may preempt ── victim ── preempt ── requeue ── grow again
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from itertools import takewhile

from mlxserve.cache.kinds.kind import EndKind
from mlxserve.cache.pages import PagePool
from mlxserve.core.config import PreemptionMode, SchedulerConfig
from mlxserve.core.stats import SchedulerStats
from mlxserve.request import LiveRequest
from mlxserve.scheduler.page_tables import PageTables
from mlxserve.scheduler.roster import Roster
from mlxserve.scheduler.step import Step
from mlxserve.scheduler.waiting import order

logger = logging.getLogger("mlxserve.scheduler")

PREEMPTIONS_PER_WARNING = 50  # as in vLLM: an overload of minutes must not fill the log


class Preemption:
    """Preempts running requests, which then wait in the queue."""

    def __init__(
        self, config: SchedulerConfig, tables: PageTables, roster: Roster, stats: SchedulerStats
    ) -> None:
        self._config = config
        self._tables = tables
        self._pool = tables.pool
        self._roster = roster
        self._stats = stats

    def might_preempt(self) -> bool:
        """Return True if a plan made now might preempt: then read the unread step first.

        An overestimate: counts one page for each running request that has no slot left. Only an image that
        one chunk computes needs more, and waits until nothing is unread.
        """
        running, tables = self._roster.running, self._tables
        num_free = tables.num_free if tables.ends else self._pool.num_free
        if len(running) <= num_free:
            return False
        page_size = self._pool.page_size
        needed = sum(
            request.num_computed >= len(request.page_table) * page_size
            for request in running.values()
        )
        return needed > num_free

    def grow(self, request: LiveRequest, end: int, step: Step) -> bool:
        """Make the request's table cover `end` tokens, preempting if the step may.

        Returns False if the table was not grown. A victim must not be planned yet, or the caller drops it from
        the plan.
        """
        while not self._tables.grow(request, end):
            victim = self._victim() if step.may_preempt else None
            if victim is None:
                return False
            step.has_preempted = True
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _victim(self) -> LiveRequest | None:
        """Return the request to preempt next; None if none would free a page."""
        running = self._roster.running.values()
        scarce = next((end for end in self._tables.ends if not end.room.num_free()), None)
        return choose_victim(running, self._pool, self._config.immune_after_preemptions, scarce)

    def _preempt(self, request: LiveRequest) -> None:
        """Requeue a request for lack of pages; in mode SWAP its own pages go to disk first."""
        self._count(request)
        number = self._stats.num_preemptions
        is_logged = number % PREEMPTIONS_PER_WARNING == 1
        is_immune = request.num_preemptions == self._config.immune_after_preemptions
        self._stats.immune_requests += is_immune
        save, is_on_disk = None, False
        if self._config.preemption_mode is PreemptionMode.SWAP:
            save = self._tables.save(request, number if is_logged else None)
            is_on_disk = save is None and self._tables.reading(request, 0) is not None
        self.requeue(request)
        if is_logged and save is None:  # else `Moves.finish_save` logs it
            warn(request.id, number, is_swapped=is_on_disk)

    def preempt_to(self, num_left: int) -> int:
        """Requeue all but the first `num_left` requests by class and age; return how many.

        No step may be unread. Nothing is swapped: pages on their way to the disk take memory.
        """
        assert not self._tables.num_unread, "an unread step uses pages"
        victims = sorted(self._roster.running.values(), key=order)[num_left:]
        for request in reversed(victims):
            self._count(request)
            self.requeue(request)
        return len(victims)

    def preempt_for(self, answer: LiveRequest) -> None:
        """Requeue an answer for a request of a higher class."""
        answer.num_preemptions += 1
        self._stats.priority_preemptions += 1
        if self._config.preemption_mode is PreemptionMode.SWAP:
            self._tables.save(answer, None)
        self.requeue(answer)

    def _count(self, request: LiveRequest) -> None:
        request.num_preemptions += 1
        self._stats.num_preemptions += 1

    def requeue(self, request: LiveRequest) -> None:
        """Release the pages of a running request, and queue it."""
        self._tables.release(request)
        request.num_lost = request.num_computed
        request.num_computed = 0
        self._roster.requeue(request)


def warn(request_id: str, number: int, *, is_swapped: bool) -> None:
    logger.warning(
        "Request %s is preempted by %s mode because there is not enough KV cache space. "
        "This can affect the end-to-end performance. Increase gpu_memory_utilization or "
        "tensor_parallel_size, or decrease max_num_seqs or max_num_batched_tokens. total_cumulative_preemption_cnt=%d",
        request_id,
        PreemptionMode.SWAP if is_swapped else PreemptionMode.RECOMPUTE,
        number,
    )


def choose_victim(
    running: Iterable[LiveRequest],
    pool: PagePool,
    immune_after: int,
    scarce: EndKind | None = None,
) -> LiveRequest | None:
    """Return the request to preempt: of the lowest class the cheapest, of these the youngest.

    None if no request can be preempted. A request preempted `immune_after` times is spared while others of its class can be preempted,
    so that every request finishes; among such requests the youngest goes first, so the oldest
    always finishes. Cheapest first instead of youngest first: 10 % less time in simulated overload, because far
    fewer tokens are computed twice.

    scarce: the kind that lacks a unit, if it is not `pool`
    """
    able = [r for r in running if r.num_in_flight == 0]
    able = [r for r in able if (scarce.room.num_own(r) if scarce else _frees_a_page(r, pool))]
    lowest = max((r.asked.priority for r in able), default=0)
    able = [r for r in able if r.asked.priority == lowest]
    if mortal := [r for r in able if r.num_preemptions < immune_after]:
        return min(mortal, key=lambda r: (recompute_cost(r, pool), -r.arrival))
    return max(able, key=lambda r: r.arrival, default=None)


def recompute_cost(request: LiveRequest, pool: PagePool) -> int:
    """Return the computed tokens that preempting would lose: all but the prefix that others hold.

    The request's own hashed pages stay findable, but they are the first to be evicted.
    """
    kept = sum(1 for _ in takewhile(lambda page: not pool.is_exclusive(page), request.page_table))
    return max(0, request.num_computed - kept * pool.page_size)


def _frees_a_page(request: LiveRequest, pool: PagePool) -> bool:
    # From the end, where the pages that no other request holds are found first.
    return any(pool.is_exclusive(page) for page in reversed(request.page_table))

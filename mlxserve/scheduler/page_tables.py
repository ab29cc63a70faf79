"""PageTables: the running requests, and the pages that they get, grow by, and have to give up.

waiting ── started ──▶ running ─┬─ grow: free pages, or those of a victim, who is set back
   ▲                            │
   └──── set back, no pages ◀───┘
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from mlxserve.cache.pages import PagePool
from mlxserve.config import PreemptionMode, SchedulerConfig
from mlxserve.request import LiveRequest, RequestState, as_page_table
from mlxserve.scheduler.capacity import Capacity
from mlxserve.scheduler.copies import Copies
from mlxserve.scheduler.preemption import choose_victim
from mlxserve.scheduler.prefix_cache import PrefixCache
from mlxserve.scheduler.prefix_followers import PrefixFollowers
from mlxserve.scheduler.step import Step
from mlxserve.scheduler.swap import Swap
from mlxserve.scheduler.waiting import WaitingQueue
from mlxserve.stats import SchedulerStats

logger = logging.getLogger("mlxserve.scheduler")


class PageTables:
    """The scheduler puts requests into `running` and takes those out that end."""

    def __init__(
        self,
        config: SchedulerConfig,
        pool: PagePool,
        cache: PrefixCache,
        capacity: Capacity,
        followers: PrefixFollowers,
        copies: Copies,
        swap: Swap,
        waiting: WaitingQueue,
        stats: SchedulerStats,
    ) -> None:
        self.running: dict[str, LiveRequest] = {}  # in the order of admission
        self._config = config
        self._pool = pool
        self._cache = cache
        self._capacity = capacity
        self._followers = followers
        self._copies = copies
        self._swap = swap
        self._waiting = waiting
        self._stats = stats

    def might_preempt(self) -> bool:
        """Whether their next tokens might need more pages than are free.

        Errs on the side of yes: counts one page for each running request that has no slot left.
        """
        page_size, num_free = self._pool.page_size, self._pool.num_free
        if len(self.running) <= num_free:
            return False
        needed = sum(
            request.num_computed >= len(request.page_table) * page_size
            for request in self.running.values()
        )
        return needed > num_free

    def room(self, request: LiveRequest) -> int:
        """Tokens that the request's pages and all free ones could still take."""
        pages = len(request.page_table) + self._pool.num_free
        return pages * self._pool.page_size - request.num_computed

    def grow(self, request: LiveRequest, end: int, step: Step) -> bool:
        """Make the page table cover `end` tokens, by preempting if the step may."""
        table = request.page_table
        missing = -(-end // self._pool.page_size) - len(table)
        if missing <= 0:
            return True
        while (pages := self._pool.allocate(missing, table[-1] if table else None)) is None:
            victim = self.victim() if step.may_preempt else None
            if victim is None:
                return False
            step.refund(victim)
            step.has_preempted = True
            self.preempt(victim)
            if victim is request:
                return False
        request.page_table = table + as_page_table(pages)
        return True

    def requeue(self, request: LiveRequest) -> None:
        """From running to waiting, without its pages."""
        request.num_lost = request.num_computed
        self.release(request)
        request.loading = None
        request.num_computed = 0
        request.state = RequestState.WAITING
        self._followers.leave(request)
        del self.running[request.id]
        self._waiting.add(request)
        self._capacity.measure(request)

    def release(self, request: LiveRequest) -> None:
        """Give its pages back. Only once no unread step uses them."""
        assert request.num_in_flight == 0, "an unread step uses these pages"
        self._copies.drop(request)
        self._pool.release(request.page_table)
        request.page_table = as_page_table()

    def renumber(self, request: LiveRequest, moves: Mapping[int, int]) -> None:
        """Its pages have moved, to those that `moves` names."""
        if not moves.keys().isdisjoint(request.page_table):
            request.page_table = as_page_table(moves.get(p, p) for p in request.page_table)

    def victim(self) -> LiveRequest | None:
        """Who gives its pages up next; None if nobody would free one."""
        return choose_victim(
            self.running.values(), self._pool, self._config.immune_after_preemptions
        )

    def preempt(self, request: LiveRequest) -> None:
        """Set it back for want of pages, its own saved first where that is the mode."""
        request.num_preemptions += 1
        is_immune = request.num_preemptions == self._config.immune_after_preemptions
        self._stats.immune_requests += is_immune
        mode = PreemptionMode.RECOMPUTE
        if self._config.preemption_mode is PreemptionMode.SWAP:
            self._cache.hash(request)
            self._stats.swapped_tokens += self._swap.save(request)
            mode = PreemptionMode.SWAP if request.saved else mode
        self.requeue(request)
        self._stats.num_preemptions += 1
        logger.warning(
            "Request %s is preempted by %s mode because there is not enough KV cache space. "
            "This can affect the end-to-end performance. Increase gpu_memory_utilization or "
            "decrease max_num_seqs or max_num_batched_tokens. total_cumulative_preemption_cnt=%d",
            request.id,
            mode,
            self._stats.num_preemptions,
        )

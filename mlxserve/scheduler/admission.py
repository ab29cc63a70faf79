"""Admission: which of the waiting requests start in this step, each only if it will find its pages.

Decides, and changes nothing but its counters: the scheduler starts whom it names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

from mlxserve.cache.pages import PagePool
from mlxserve.config import SchedulerConfig
from mlxserve.request import LiveRequest
from mlxserve.scheduler.limit import Limit, LimitReason, limit
from mlxserve.scheduler.prefix_cache import PrefixCache, Tail
from mlxserve.scheduler.prefix_followers import PrefixFollowers
from mlxserve.scheduler.step import Step
from mlxserve.scheduler.swap import Swap
from mlxserve.scheduler.waiting import WaitingQueue
from mlxserve.stats import SchedulerStats

MAX_PASSED = 3  # requests without memory looked past in one step, as each look costs its length
MAX_CANDIDATES = 16  # waiting requests looked at in one step; bounds its time when they are long


class Admitted(NamedTuple):
    request: LiveRequest
    cached: list[int]  # pages it finds, from its first on
    tail: Tail | None  # and what it copies of the next one
    share: Limit | None  # None where it begins with pages from the disk


class Admission:
    """Looks at the waiting requests in order."""

    def __init__(
        self,
        config: SchedulerConfig,
        pool: PagePool,
        cache: PrefixCache,
        followers: PrefixFollowers,
        swap: Swap,
        stats: SchedulerStats,
    ) -> None:
        self._config = config
        self._pool = pool
        self._cache = cache
        self._followers = followers
        self._swap = swap
        self._stats = stats

    def choose(
        self, waiting: WaitingQueue, running: Mapping[str, LiveRequest], step: Step, now: int
    ) -> Iterator[Admitted]:
        """Those that start in step number `now`; each has to be started before the next is asked
        for.

        What running requests have not computed of their prompts is reserved: merely checking lets
        two long prompts in together that then preempt each other (P2 in vllm#37307).
        """
        if not self._has_place(waiting, running, step):
            return
        self._stats.pages_reserved = self.num_reserved(running)
        available = self._pool.num_free - self._stats.pages_reserved
        passed: list[LiveRequest] = []
        for request in islice(waiting.in_order(now), MAX_CANDIDATES):
            if not self._has_place(waiting, running, step):
                return
            if passed and not self._may_overtake(request, passed):
                return
            cached = self._cache.match(request)
            if self._followers.must_wait(request, self._cache.matchable(request, len(cached))):
                continue
            if passed and not self._is_short(request, len(cached)):
                return
            # Most would fit even with nothing cached, and most are deferred: counting comes last.
            if self._num_pages(request) > available < self._num_needed(request, cached):
                passed.append(request)
                continue
            tail = self._tail(request, cached, available)
            start = len(cached) * self._pool.page_size + (tail.num_tokens if tail else 0)
            share = self._first_share(request, start, step)
            if share is not None and share.reason is LimitReason.ALIGNMENT:
                self._stats.align_deferrals += 1
                continue
            if share is not None and share.reason is not None:
                return
            available -= self._num_needed(request, cached)
            available -= self._pool.num_idle([tail.page]) if tail else 0
            yield Admitted(request, cached, tail, share)
            for other in passed:
                other.num_overtaken += 1
                self._stats.overtakes += 1

    def _has_place(
        self, waiting: WaitingQueue, running: Mapping[str, LiveRequest], step: Step
    ) -> bool:
        return len(waiting) > 0 and step.budget > 0 and len(running) < self._config.max_num_seqs

    def _may_overtake(self, request: LiveRequest, passed: Sequence[LiveRequest]) -> bool:
        return (
            len(passed) <= MAX_PASSED
            and passed[0].asked.priority == request.asked.priority
            and all(other.num_overtaken < self._config.max_overtakes for other in passed)
        )

    def _is_short(self, request: LiveRequest, num_cached_pages: int) -> bool:
        num_uncached = len(request.token_ids) - num_cached_pages * self._pool.page_size
        return num_uncached <= (
            self._config.long_prefill_token_threshold or self._config.max_num_batched_tokens
        )

    def num_reserved(self, running: Mapping[str, LiveRequest]) -> int:
        """Pages that running requests will need: for their prompts, and to grow if that failed.

        To grow by the 75th percentile of past answers gained nothing over `growth_pages` = 2. Five
        paired seeds, 48 chats in 1,024 pages: makespan +16 ± 11 s of 1,252, TTFT p95 +1.5 ± 2.1 s
        of 93, preemptions 12 instead of 8; no reserve at all: 36 preemptions, five times the
        tokens computed again.
        """
        growth = self._config.growth_pages * len(running) if self._stats.num_preemptions else 0
        page_size = self._pool.page_size
        return growth + sum(
            max(0, -(-request.prefill_end // page_size) - len(request.page_table))
            for request in running.values()
        )

    def _num_pages(self, request: LiveRequest) -> int:
        return -(-len(request.token_ids) // self._pool.page_size)

    def _num_needed(self, request: LiveRequest, cached: Sequence[int]) -> int:
        """Free pages that it takes, those among them that it finds included."""
        needed = self._num_pages(request) - len(cached)
        needed += self._pool.num_idle(cached)
        return needed

    def _tail(self, request: LiveRequest, cached: Sequence[int], available: int) -> Tail | None:
        """What it can copy: until that is done, a source that nobody else holds is one page more."""
        tail = self._cache.tail(request, cached)
        if tail is None:
            return None
        spare = available - self._num_needed(request, cached)
        return tail if self._pool.num_idle([tail.page]) <= spare else None

    def _first_share(self, request: LiveRequest, start: int, step: Step) -> Limit | None:
        """None where it begins with pages from the disk."""
        if self._swap.num_tokens(request, start):
            return None
        stop = self._swap.stop(request, start)
        return limit(start, stop, len(request.token_ids), step.budget, step.ctx)

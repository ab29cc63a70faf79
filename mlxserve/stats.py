"""Stats: a frozen picture of the engine, for logs, metrics and screens."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640)
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


@dataclass(frozen=True, slots=True)
class Distribution:
    """How often values fell up to each bound (and not up to the one before), and their sum.

    `counts` has one entry more than `bounds`: for what lies above all of them.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float = 0.0


class Histogram:
    """Counts values into a Distribution."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    def snapshot(self) -> Distribution:
        return Distribution(self._bounds, tuple(self._counts), self._total)


class Rate:
    """Events per second over the last `SPAN` seconds, counted by the second."""

    SPAN = 5

    def __init__(self) -> None:
        self._counts: deque[list[int]] = deque(maxlen=self.SPAN)  # [second, count]

    def add(self, now: float, count: int) -> None:
        second = int(now)
        if not self._counts or self._counts[-1][0] != second:
            self._counts.append([second, 0])
        self._counts[-1][1] += count

    def per_second(self, now: float) -> float:
        first = int(now) - self.SPAN + 1
        return sum(count for second, count in self._counts if second >= first) / (now - first)


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of the device's memory. What is reserved is kept by mlx for its next arrays."""

    kv_cache: int
    active: int
    reserved: int
    peak: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """Gauges of this moment, and counters since the engine started.

    A page is free or active (held by a running request, or pinned); either kind can be cached,
    which means that its content is found by its hash.
    """

    num_requests_running: int = 0
    num_requests_waiting: int = 0
    pages_free: int = 0
    pages_active: int = 0
    pages_cached: int = 0
    pages_pinned: int = 0  # of the active ones, those that named prefixes keep
    pages_hot: int = 0  # of the free ones, those that outlive others as they were found often
    pages_reserved: int = 0  # kept for running requests, when a new one last waited
    swap_bytes: int = 0  # on disk
    sched_budget_tokens: int = 0  # the step budget in force
    # counters
    prefix_cache_queries: int = 0  # tokens of admitted prompts
    prefix_cache_hits: int = 0  # those found in the cache
    num_preemptions: int = 0
    prompt_tokens: int = 0  # computed, or found in the cache
    prefill_tokens: int = 0  # of prompts, computed and not found; again after a preemption
    generation_tokens: int = 0
    recomputed_tokens: int = 0  # computed again after a preemption
    swapped_tokens: int = 0  # written to disk in preemptions
    restored_tokens: int = 0  # read back instead of computed again
    align_deferrals: int = 0
    overtakes: int = 0
    prefix_follow_waits: int = 0
    immune_requests: int = 0
    rebound_pages: int = 0
    tail_copies: int = 0
    evicted_pages: int = 0
    num_steps: int = 0
    request_success: Mapping[str, int] = field(default_factory=dict)  # by finished_reason
    # distributions since the engine started
    queue_seconds: Distribution | None = None  # from a request's arrival to its first step
    prefill_seconds: Distribution | None = None  # from there to its first token
    iteration_tokens: Distribution | None = None  # tokens computed in a step

    @property
    def num_pages(self) -> int:
        return self.pages_free + self.pages_active

    @property
    def kv_cache_usage_perc(self) -> float:
        """Share of the pool that is held by running requests or pinned, 0 to 1."""
        return self.pages_active / self.num_pages if self.num_pages else 0.0

"""/metrics: the engine's counters, read when asked for, and the latencies seen from here.

The registry belongs to one app, so that two apps in one process (tests) do not meet. Names are
vLLM's with the prefix `mlxserve:`, so that its dashboards need a search and replace only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import TYPE_CHECKING

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from starlette.responses import Response

from mlxserve.api.server.retry_after import Turnover
from mlxserve.stats import SECONDS, Histogram

if TYPE_CHECKING:
    from mlxserve.chat import Answer, Chat, Delta
    from mlxserve.stats import Distribution, Stats

_GAUGES = {
    "num_requests_running": "Requests that hold pages.",
    "num_requests_waiting": "Requests in the queue.",
    "kv_cache_usage_perc": "Share of the pages that requests or named prefixes hold, 0 to 1.",
    "pages_pinned": "Pages that named prefixes keep.",
    "pages_hot": "Free pages that were found often, and so are evicted after others.",
    "pages_reserved": "Pages kept for running requests when a new one last waited.",
    "swap_bytes": "Bytes of pages on disk.",
    "sched_budget_tokens": "Tokens the last step was allowed to compute.",
}
_COUNTERS = {
    "prefix_cache_queries": "Prompt tokens looked up in the prefix cache.",
    "prefix_cache_hits": "Prompt tokens found there.",
    "num_preemptions": "Times a running request lost its pages to another.",
    "prompt_tokens": "Prompt tokens of admitted requests.",
    "prefill_tokens": "Prompt tokens computed, those computed again included.",
    "generation_tokens": "Tokens generated.",
    "recomputed_tokens": "Tokens computed again after a preemption.",
    "swapped_tokens": "Tokens whose pages were written to disk in a preemption.",
    "restored_tokens": "Tokens whose pages were read back instead of computed again.",
    "align_deferrals": "Chunks put off because they would not have ended on a page boundary.",
    "overtakes": "Times a request was admitted before an older one that did not fit.",
    "prefix_follow_waits": "Requests that waited for another to compute the prefix they share.",
    "immune_requests": "Requests preempted so often that others go first from then on.",
    "rebound_pages": "Pages given back for another request's with the same content.",
    "tail_copies": "Pages that began as a copy of another one.",
    "evicted_pages": "Cached pages given up for new ones.",
}
_DISTRIBUTIONS = {  # name: (field of Stats, documentation)
    "request_queue_time_seconds": (
        "queue_seconds",
        "From a request's arrival to its first step.",
    ),
    "request_prefill_time_seconds": (
        "prefill_seconds",
        "From a request's first step to its first token.",
    ),
    "iteration_tokens": ("iteration_tokens", "Tokens computed in a step."),
}


_LATENCIES = {  # field of Metrics: (name, documentation)
    "time_to_first_token": (
        "time_to_first_token_seconds",
        "From the request's admission to its first token.",
    ),
    "inter_token_latency": (
        "inter_token_latency_seconds",
        "Between one token of an answer and the next.",
    ),
    "e2e_latency": (
        "e2e_request_latency_seconds",
        "From the request's admission to the answer's end.",
    ),
    "decode_time": (
        "request_decode_time_seconds",
        "From an answer's first token to its last.",
    ),
}


class Metrics:
    """The registry of one app. Its histograms are filled in the event loop: they have no locks."""

    def __init__(self, chat: Chat) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(_EngineStats(chat))
        self.registry.register(_Latencies(self, chat.model_name))
        self.turnover = Turnover()
        self.time_to_first_token = Histogram(SECONDS)
        self.inter_token_latency = Histogram(SECONDS)
        self.e2e_latency = Histogram(SECONDS)
        self.decode_time = Histogram(SECONDS)

    def timed(self, clock: Callable[[], float] = time.perf_counter) -> Timed:
        return Timed(self, clock)

    def response(self) -> Response:
        """The page. The engine's snapshot is taken here, so call it beside the event loop."""
        text = generate_latest(self.registry)
        return Response(text, headers={"content-type": CONTENT_TYPE_LATEST})


class Timed:
    """An `Answer` that notes when its tokens come. Made just before the request is submitted."""

    def __init__(self, metrics: Metrics, clock: Callable[[], float]) -> None:
        self._metrics = metrics
        self._clock = clock
        self._submitted = clock()
        self._first: float | None = None
        self._last = self._submitted

    def start(self, answer: Answer) -> None:
        self._answer = answer
        self._deltas = aiter(answer)

    def __aiter__(self) -> Timed:
        return self

    async def __anext__(self) -> Delta:
        delta = await self._deltas.__anext__()
        self._observe(delta)
        return delta

    async def aclose(self) -> None:
        await self._answer.aclose()

    def _observe(self, delta: Delta) -> None:
        now = self._clock()
        if delta.token_ids:
            self._observe_tokens(now, len(delta.token_ids))
        if delta.finish_reason is not None:
            self._metrics.turnover.ended()
            self._metrics.e2e_latency.observe(now - self._submitted)
            if self._first is not None:
                self._metrics.decode_time.observe(now - self._first)

    def _observe_tokens(self, now: float, num_tokens: int) -> None:
        if self._first is None:
            self._first = now
            self._metrics.time_to_first_token.observe(now - self._submitted)
        else:
            gap = (now - self._last) / num_tokens
            for _ in range(num_tokens):
                self._metrics.inter_token_latency.observe(gap)
        self._last = now


class _Latencies(Collector):
    """What was seen from here as metric families."""

    def __init__(self, metrics: Metrics, model: str) -> None:
        self._metrics = metrics
        self._label = [model]

    def collect(self) -> Iterator[Metric]:
        for field, (name, documentation) in _LATENCIES.items():
            seen = getattr(self._metrics, field).snapshot()
            yield _histogram(f"mlxserve:{name}", documentation, seen, self._label)


class _EngineStats(Collector):
    """The engine's snapshot as metric families."""

    def __init__(self, chat: Chat) -> None:
        self._chat = chat

    def collect(self) -> Iterator[Metric]:
        stats = self._chat.stats()
        label = [self._chat.model_name]
        for name, documentation in _GAUGES.items():
            gauge = GaugeMetricFamily(f"mlxserve:{name}", documentation, labels=["model_name"])
            gauge.add_metric(label, float(getattr(stats, name)))
            yield gauge
        for name, documentation in _COUNTERS.items():
            counter = CounterMetricFamily(f"mlxserve:{name}", documentation, labels=["model_name"])
            counter.add_metric(label, float(getattr(stats, name)))
            yield counter
        for name, (field, documentation) in _DISTRIBUTIONS.items():
            if (distribution := getattr(stats, field)) is not None:
                yield _histogram(f"mlxserve:{name}", documentation, distribution, label)
        yield _pages(stats, label)
        yield _successes(stats, label)


def _histogram(
    name: str, documentation: str, distribution: Distribution, label: list[str]
) -> Metric:
    bounds = [*(str(float(bound)) for bound in distribution.bounds), "+Inf"]
    counts = map(float, accumulate(distribution.counts))
    buckets = list(zip(bounds, counts, strict=True))
    histogram = HistogramMetricFamily(name, documentation, labels=["model_name"])
    histogram.add_metric(label, buckets, distribution.total)
    return histogram


def _pages(stats: Stats, label: list[str]) -> Metric:
    pages = GaugeMetricFamily(
        "mlxserve:pages",
        "Pages of the KV pool: free, active (held by requests), cached (found by hash, evictable).",
        labels=["model_name", "state"],
    )
    for state in ("free", "active", "cached"):
        pages.add_metric([*label, state], float(getattr(stats, f"pages_{state}")))
    return pages


def _successes(stats: Stats, label: list[str]) -> Metric:
    successes = CounterMetricFamily(
        "mlxserve:request_success",
        "Requests that ended, by reason.",
        labels=["model_name", "finished_reason"],
    )
    for reason, count in sorted(stats.request_success.items()):
        successes.add_metric([*label, str(reason)], float(count))
    return successes

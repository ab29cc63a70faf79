"""/metrics: every number of `Stats`, and the latencies measured in the event loop.

Names, types and help texts are those that `stats.py` declares beside the fields. Names are vLLM's
with the prefix `mlxserve:`, so that the panels of its dashboards work after a search and replace,
but for those of `request_max_num_generation_tokens`, `request_inference_time_seconds`,
`request_params_*` and `cache_config_info`, which have no counterpart here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import accumulate
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, TypeAlias

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from starlette.responses import Response

from mlxserve.api.server.retry_after import RetryAfter
from mlxserve.core.stats import (
    SECONDS,
    Exported,
    Histogram,
    Stats,
    StatsGroup,
    exports_of,
    histogram,
)

if TYPE_CHECKING:
    from mlxserve.text.deltas import Delta


@dataclass(slots=True)
class Latencies(StatsGroup):
    """Latencies in seconds, measured in the event loop."""

    time_to_first_token_seconds: Annotated[
        Histogram, histogram("From the request's admission to its first token.")
    ] = field(default_factory=lambda: Histogram(SECONDS))
    inter_token_latency_seconds: Annotated[
        Histogram, histogram("Between one token of an answer and the next.")
    ] = field(default_factory=lambda: Histogram(SECONDS))
    e2e_request_latency_seconds: Annotated[
        Histogram, histogram("From the request's admission to the answer's end.")
    ] = field(default_factory=lambda: Histogram(SECONDS))
    request_decode_time_seconds: Annotated[
        Histogram, histogram("From an answer's first token to its last.")
    ] = field(default_factory=lambda: Histogram(SECONDS))


class Metrics:
    """The metrics of one model. Its histograms are filled in the event loop, without locks."""

    def __init__(self, model_name: str, stats: Callable[[], Stats]) -> None:
        self.model_name = model_name
        self.stats = stats
        self.latencies = Latencies()
        self.retry_after = RetryAfter()

    def timer(self, clock: Callable[[], float] = time.perf_counter) -> AnswerTimer:
        return AnswerTimer(self, clock)


def metrics_page(
    models: Sequence[Metrics], loop_blocked_seconds: Mapping[str, float] = MappingProxyType({})
) -> Response:
    """Render the metrics of all models, each under its label. Call it beside the event loop.

    loop_blocked_seconds: by the route that held the event loop
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(models))
    registry.register(_LoopCollector(loop_blocked_seconds))
    text = generate_latest(registry)
    return Response(text, headers={"content-type": CONTENT_TYPE_LATEST})


class AnswerTimer:
    """Measures when the tokens of one answer arrive. Create it just before submitting the request."""

    def __init__(self, metrics: Metrics, clock: Callable[[], float]) -> None:
        self._metrics = metrics
        self._clock = clock
        self._submitted = clock()
        self._first: float | None = None
        self._last = self._submitted

    @property
    def to_first_token(self) -> float:
        """Seconds from submission to the first token, or until now if there is none yet."""
        return (self._clock() if self._first is None else self._first) - self._submitted

    @property
    def since_first_token(self) -> float:
        """Seconds from the first token until now; 0 if there is none yet."""
        return 0.0 if self._first is None else self._clock() - self._first

    def observe(self, delta: Delta) -> None:
        now = self._clock()
        if delta.token_ids:
            self._observe_tokens(now, len(delta.token_ids))
        if delta.finish_reason is not None:
            self._metrics.retry_after.ended()
            self._metrics.latencies.e2e_request_latency_seconds.observe(now - self._submitted)
            if self._first is not None:
                self._metrics.latencies.request_decode_time_seconds.observe(now - self._first)

    def _observe_tokens(self, now: float, num_tokens: int) -> None:
        if self._first is None:
            self._first = now
            self._metrics.latencies.time_to_first_token_seconds.observe(now - self._submitted)
        else:
            gap = (now - self._last) / num_tokens
            for _ in range(num_tokens):
                self._metrics.latencies.inter_token_latency_seconds.observe(gap)
        self._last = now


class _Collector(Collector):
    """Collects every group of numbers as metric families."""

    def __init__(self, models: Sequence[Metrics]) -> None:
        self._models = models

    def collect(self) -> Iterable[Metric]:
        families: dict[str, _Family] = {}
        for model in self._models:
            stats = model.stats()
            groups = [getattr(stats, group.name) for group in fields(stats)]
            for group in (*groups, model.latencies.copy()):
                for attribute, exported in exports_of(type(group)):
                    name = exported.name or attribute
                    if name not in families:
                        families[name] = _family(name, exported)
                    value = getattr(group, attribute)
                    _fill(families[name], exported, value, model.model_name)
        return families.values()


class _LoopCollector(Collector):
    """Collects what is of the server, and of no model."""

    def __init__(self, blocked_seconds: Mapping[str, float]) -> None:
        self._blocked_seconds = blocked_seconds

    def collect(self) -> Iterable[Metric]:
        family = CounterMetricFamily(
            "mlxserve:loop_blocked_seconds",
            "Seconds in which a route held the event loop for more than 50 ms at once.",
            labels=["route"],
        )
        for route, seconds in sorted(self._blocked_seconds.items()):
            family.add_metric([route], seconds)
        yield family


_Family: TypeAlias = GaugeMetricFamily | CounterMetricFamily | HistogramMetricFamily
_FAMILIES = {
    "gauge": GaugeMetricFamily,
    "counter": CounterMetricFamily,
    "histogram": HistogramMetricFamily,
}


def _family(name: str, exported: Exported) -> _Family:
    labels = ["model_name", *filter(None, [exported.label])]
    family: _Family = _FAMILIES[exported.kind](f"mlxserve:{name}", exported.help, labels=labels)
    return family


def _fill(
    family: _Family,
    exported: Exported,
    value: float | Histogram | Mapping[str, int],
    model_name: str,
) -> None:
    """Add a field's value. A mapping adds one sample per key, under the field's label."""
    if isinstance(family, HistogramMetricFamily):
        assert isinstance(value, Histogram)
        bounds = [*(str(float(bound)) for bound in value.bounds), "+Inf"]
        counts = map(float, accumulate(value.counts))
        family.add_metric([model_name], list(zip(bounds, counts, strict=True)), value.total)
    elif isinstance(value, Mapping):
        for key, count in sorted(value.items()):
            family.add_metric([model_name, key], count)
    else:
        assert isinstance(value, (int, float))
        family.add_metric([model_name, *filter(None, [exported.value])], value)

"""`/health`, `/ready`, `/metrics` and `/version`: the routes that monitoring polls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mlxserve.api.access.security import may_see_totals, require_totals
from mlxserve.api.errors import RETRY_SOON, ApiError, json_response
from mlxserve.api.fair_work import run_fairly
from mlxserve.api.metrics import Metrics, metrics_page
from mlxserve.api.server.drain import Drain
from mlxserve.api.server.loop_watch import LoopWatch
from mlxserve.api.server.watchdog import MAX_SILENCE
from mlxserve.core.version import __version__
from mlxserve.helpers.work import Work

if TYPE_CHECKING:
    from mlxserve.chat.text_model import TextModel
    from mlxserve.engine.async_engine import AsyncEngine

_PAGE_SECONDS = 0.01  # for the metrics of a model
MEMORY_LEVELS = ("normal", "high", "critical")
DISK_STATES = ("off", "works", "reads_only", "stalled", "failed")


class MonitoredModel(Protocol):
    """The parts of a loaded model that monitoring reads."""

    @property
    def text_model(self) -> TextModel: ...
    @property
    def metrics(self) -> Metrics: ...


class Status:
    """The endpoints over the loaded models; a number is their sum, or the worst."""

    def __init__(
        self,
        model_name: str,
        loaded: Callable[[], Sequence[MonitoredModel]],
        drain: Drain,
        watch: LoopWatch,
    ) -> None:
        """model_name: the model of requests that name none."""
        self._watch = watch
        self._model_name = model_name
        self._loaded = loaded
        self._drain = drain

    def routes(self) -> list[Route]:
        return [
            Route("/health", self.health, methods=["GET"]),
            Route("/ready", self.ready, methods=["GET"]),
            Route("/metrics", self.metrics, methods=["GET"]),
            Route("/version", self.version, methods=["GET"]),
        ]

    async def health(self, _request: Request) -> Response:
        """Reports whether the engine is alive; a dead one needs a restart. Needs no API key.

        A step that does not end may still do so: its status is `stalled`, and 200.
        """
        engines = self._engines()
        silence, stats = _silence(engines), [engine.stats() for engine in engines]
        return json_response(
            {
                "status": "ok" if silence <= MAX_SILENCE else "stalled",
                "seconds_since_step": round(silence, 3),
                "engine_failures": sum(each.engine.engine_failures for each in stats),
                "memory": MEMORY_LEVELS[
                    max((each.engine.memory_level for each in stats), default=0)
                ],
                "event_loop": self._watch.blocked.card(),
                "disk_cache": DISK_STATES[max((each.disk.state for each in stats), default=0)],
            }
        )

    async def ready(self, request: Request) -> Response:
        """Reports whether requests are served now, and how many run and wait."""
        engines = self._engines()
        if self._drain.is_on:
            raise self._drain.refusal()
        silence = _silence(engines)
        if silence > MAX_SILENCE:
            raise ApiError(
                503,
                f"The engine has not finished a step for {silence:.0f} seconds.",
                code="engine_stalled",
                headers=RETRY_SOON,
            )
        reply = {"status": "ready", "model": self._model_name}
        if not may_see_totals(request):
            return json_response(reply)
        stats = [engine.stats() for engine in engines]
        totals = {
            "num_requests_running": sum(each.scheduler.num_running for each in stats),
            "num_requests_waiting": sum(each.scheduler.num_waiting for each in stats),
            "kv_cache_usage_perc": max((each.pool.usage for each in stats), default=0.0),
            "seconds_since_step": round(silence, 3),
        }
        return json_response({**reply, **totals})

    async def version(self, _request: Request) -> Response:
        """Reports the server's version."""
        return json_response({"version": __version__})

    def _engines(self) -> list[AsyncEngine]:
        """The engines that are alive. Raises ApiError if all have ended."""
        engines = [model.text_model.engine for model in self._loaded()]
        alive = [engine for engine in engines if engine.is_alive()]
        if engines and not alive:
            raise ApiError(
                503, "The engine has stopped. Restart the server.", code="engine_stopped"
            )
        return alive

    async def metrics(self, request: Request) -> Response:
        """Reports counters and latencies in the Prometheus text format."""
        require_totals(request)
        models = [model.metrics for model in self._loaded()]
        page: Work[Response] = Work(
            _PAGE_SECONDS * len(models), partial(metrics_page, models, self._watch.seconds_by_route)
        )
        return await run_fairly(request, page)


def _silence(engines: Sequence[AsyncEngine]) -> float:
    return max((engine.seconds_since_beat() for engine in engines), default=0.0)

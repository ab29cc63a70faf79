"""`/health`, `/ready`, `/metrics` and `/version`: the routes that monitoring polls."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mlxserve.api.access.security import may_see_totals, require_totals
from mlxserve.api.errors import RETRY_SOON, ApiError, json_response
from mlxserve.api.metrics import Metrics
from mlxserve.api.server.drain import Drain
from mlxserve.api.server.watchdog import MAX_SILENCE
from mlxserve.version import __version__

if TYPE_CHECKING:
    from mlxserve.chat.chat import Chat

MEMORY_LEVELS = ("normal", "high", "critical")
DISK_STATES = ("off", "works", "reads_only", "stalled", "failed")


class Status:
    """The endpoints over one `Chat`."""

    def __init__(self, chat: Chat, metrics: Metrics, drain: Drain) -> None:
        self._engine = chat.engine
        self._model_name = chat.model_name
        self._metrics = metrics
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
        self._require_engine()
        silence, stats = self._engine.seconds_since_beat(), self._engine.stats()
        return json_response(
            {
                "status": "ok" if silence <= MAX_SILENCE else "stalled",
                "seconds_since_step": round(silence, 3),
                "engine_failures": stats.engine.engine_failures,
                "memory": MEMORY_LEVELS[stats.engine.memory_level],
                "disk_cache": DISK_STATES[stats.disk.state],
            }
        )

    async def ready(self, request: Request) -> Response:
        """Reports whether requests are served now, and how many run and wait."""
        self._require_engine()
        if self._drain.is_on:
            raise self._drain.refusal()
        silence = self._engine.seconds_since_beat()
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
        stats = self._engine.stats()
        totals = {
            "num_requests_running": stats.scheduler.num_running,
            "num_requests_waiting": stats.scheduler.num_waiting,
            "kv_cache_usage_perc": stats.pool.usage,
            "seconds_since_step": round(silence, 3),
        }
        return json_response({**reply, **totals})

    async def version(self, _request: Request) -> Response:
        """Reports the server's version."""
        return json_response({"version": __version__})

    def _require_engine(self) -> None:
        if not self._engine.is_alive():
            raise ApiError(
                503, "The engine has stopped. Restart the server.", code="engine_stopped"
            )

    async def metrics(self, request: Request) -> Response:
        """Reports counters and latencies in the Prometheus text format."""
        require_totals(request)
        return await asyncio.to_thread(self._metrics.response)

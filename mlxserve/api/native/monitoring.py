"""Our own routes, for those who want to see what the engine does: `/api/v1/...`.

    GET  /api/v1/requests      live requests: how far each is, what it holds
    GET  /api/v1/kv/stats      the cache in numbers
    GET  /api/v1/kv/map        the cache page by page, as events (page_map.py has the format)

An API key sees its own requests, an admin's key all of them. Watching costs the engine at most one
snapshot between two steps, however many clients watch, and nothing without clients.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mlxserve.api.access.security import client_name, is_admin
from mlxserve.api.errors import RETRY_SOON, ApiError, from_engine, json_response
from mlxserve.api.native.page_map import PageMapFeed
from mlxserve.api.server.drain import Drain
from mlxserve.api.server.sse import EventStream, named_event
from mlxserve.engine.snapshot import PageState, Phase, RequestView, Snapshot
from mlxserve.errors import MlxServeError

if TYPE_CHECKING:
    from mlxserve.chat import Chat

MAP_INTERVAL = 0.25  # seconds between two events of a map
MAX_MAPS = 32  # that are watched at the same time


class Monitoring:
    """The endpoints over one `Chat`."""

    def __init__(self, chat: Chat, drain: Drain) -> None:
        self._chat = chat
        self._drain = drain
        self._snapshots = SharedSnapshots(chat)
        self._num_maps = 0

    def routes(self) -> list[Route]:
        return [
            Route("/api/v1/requests", self.requests, methods=["GET"]),
            Route("/api/v1/kv/stats", self.kv_stats, methods=["GET"]),
            Route("/api/v1/kv/map", self.kv_map, methods=["GET"]),
        ]

    async def requests(self, request: Request) -> Response:
        snapshot = await self._look()
        sees = _sight(request)
        cards = [_card(one) for one in snapshot.requests if sees(one)]
        return json_response({"object": "list", "data": cards})

    async def kv_stats(self, _request: Request) -> Response:
        return json_response(_kv_stats(await self._look()))

    async def kv_map(self, request: Request) -> Response:
        """Ends with the server; only its headers, where only they were asked for."""
        if request.method == "HEAD":
            return Response(media_type="text/event-stream")
        if self._num_maps >= MAX_MAPS:
            raise ApiError(
                503,
                f"The map is being watched {MAX_MAPS} times already.",
                code="overloaded",
                headers=RETRY_SOON,
            )
        self._num_maps += 1

        async def close() -> None:
            self._num_maps -= 1

        return EventStream(self._frames(PageMapFeed(_sight(request))), close=close)

    async def _look(self) -> Snapshot:
        try:
            return await self._snapshots.take()
        except MlxServeError as error:
            raise from_engine(error) from error

    async def _frames(self, page_map: PageMapFeed) -> AsyncGenerator[bytes, None]:
        """The engine is asked only when its counters moved. Ends with the server."""
        seen = None
        try:
            while not self._drain.is_on:
                if seen is None or self._chat.stats() != seen.stats:
                    seen = await self._snapshots.take()
                # Also where nothing moved: what did not fit into the last event is still to come.
                event = await asyncio.to_thread(page_map.next_event, seen)
                if event is not None:
                    yield event
                await asyncio.sleep(MAP_INTERVAL)
        except MlxServeError as error:
            yield named_event("error", from_engine(error).body())


class SharedSnapshots:
    """Snapshots of the engine, shared by all callers who wait for the same one.

    A caller never gets a snapshot that was asked for before it called: one who has been told that
    a resize is done must not see what was before it. While a snapshot is under way, later callers
    wait for the next one, together.

        take ──┐
        take ──┴─> asked for ────────> taken
                      take ──┐
                      take ──┴─(lock)─> asked for ────────> taken
    """

    def __init__(self, chat: Chat) -> None:
        self._chat = chat
        self._lock = asyncio.Lock()
        self._next: asyncio.Future[Snapshot] | None = None  # not asked for yet

    async def take(self) -> Snapshot:
        """Taken after this call. Raises EngineStopped."""
        if self._next is None:
            self._next = asyncio.ensure_future(self._ask())
        return await asyncio.shield(self._next)  # for the others, if this caller is cancelled

    async def _ask(self) -> Snapshot:
        async with self._lock:
            self._next = None
            return await self._chat.snapshot()


def _sight(request: Request) -> Callable[[RequestView], bool]:
    """Whether the key that asks may see a request."""
    if is_admin(request):
        return lambda _: True
    own = client_name(request)
    return lambda one: one.client == own


def _card(one: RequestView) -> dict[str, Any]:
    return {
        "id": one.id,
        "object": "request",
        "key": one.client or None,
        "state": str(one.phase),
        "position": one.position,
        "num_computed": one.num_computed,
        "num_to_compute": one.num_to_compute,
        "prompt_tokens": one.num_prompt,
        "cached_tokens": one.num_cached,
        "output_tokens": one.num_outputs,
        "num_pages": len(one.page_table),
        "num_preemptions": one.num_preemptions,
        "priority": one.priority,
        "age_seconds": round(one.age, 3),
    }


def _kv_stats(snapshot: Snapshot) -> dict[str, Any]:
    stats = snapshot.stats
    total = len(snapshot.pages)
    count = {state.name.lower(): snapshot.num_pages(state) for state in PageState}
    queries, hits = stats.scheduler.prefix_queries, stats.scheduler.prefix_hits
    phases = [one.phase for one in snapshot.requests]
    return {
        "page_size": snapshot.page_size,
        "pages": {"total": total, **count, "used": total - count["free"] - count["cached"]},
        "bytes": {
            "kv_cache": snapshot.memory.kv_cache,
            "page": snapshot.memory.kv_cache // total,
            "active": snapshot.memory.active,
            "reserved": snapshot.memory.reserved,
            "peak": snapshot.memory.peak,
            "swap": stats.swap.num_bytes,
        },
        "prefix_cache": {
            "queries": queries,
            "hits": hits,
            "hit_rate": round(hits / queries, 4) if queries else 0.0,
        },
        "tokens_per_second": {
            "prefill": round(snapshot.prefill_rate, 2),
            "generation": round(snapshot.generation_rate, 2),
        },
        "requests": {
            "running": len(phases) - phases.count(Phase.QUEUED),
            "waiting": phases.count(Phase.QUEUED),
        },
        "num_preemptions": stats.scheduler.num_preemptions,
    }

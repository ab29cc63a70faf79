"""Routes that show the state of the engine.

    GET  /api/v1/requests      live requests: their progress and their pages
    GET  /api/v1/kv/stats      statistics of the cache
    GET  /api/v1/kv/map        the cache page by page, as events (format: page_map.py)

An API key sees its own requests, an admin key sees all. The cache is shown to admin keys only: its
numbers are totals over all keys. Any number of watchers cost the engine at most one snapshot
between two steps, and nothing while there are none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mlxserve.api.access.security import is_admin, key_id, require_admin
from mlxserve.api.errors import RETRY_SOON, ApiError, from_engine, json_response
from mlxserve.api.fair_work import run_fairly
from mlxserve.api.native.page_map import PageMapFeed
from mlxserve.api.native.snapshots import SharedSnapshots
from mlxserve.api.native.status import DISK_STATES
from mlxserve.api.server.drain import Drain
from mlxserve.api.server.sse import EventStream, Write, named_event
from mlxserve.core.errors import MlxServeError
from mlxserve.engine.snapshot import PageState, Phase, RequestView, Snapshot
from mlxserve.helpers.work import RunFairly, Work
from mlxserve.request import ANONYMOUS

if TYPE_CHECKING:
    from mlxserve.chat.text_model import TextModel

MAP_INTERVAL = 0.25  # seconds between two events of a map
_PAGES_PER_SECOND = 50_000_000
MAX_MAPS = 32  # open at the same time


class Monitoring:
    """The endpoints over one `TextModel`."""

    def __init__(self, model: TextModel, drain: Drain) -> None:
        self._engine = model.engine
        self._drain = drain
        self._snapshots = SharedSnapshots(model.engine)
        self._num_maps = 0

    def routes(self) -> list[Route]:
        return [
            Route("/api/v1/requests", self.requests, methods=["GET"]),
            Route("/api/v1/kv/stats", self.kv_stats, methods=["GET"]),
            Route("/api/v1/kv/map", self.kv_map, methods=["GET"]),
        ]

    async def requests(self, request: Request) -> Response:
        """Lists the live requests of the API key, or all of them for an admin key."""
        snapshot = await self._snapshots.take()
        sees = _visibility(request)
        cards = [_card(live) for live in snapshot.requests if sees(live)]
        return json_response({"object": "list", "data": cards})

    async def kv_stats(self, request: Request) -> Response:
        """Returns statistics of the cache."""
        require_admin(request)
        return json_response(_kv_stats(await self._snapshots.take()))

    async def kv_map(self, request: Request) -> Response:
        """Sends the map of the pages, then its changes, until the server or the client ends."""
        require_admin(request)
        if request.method == "HEAD":
            return Response(media_type="text/event-stream")
        if self._num_maps >= MAX_MAPS:
            raise ApiError(
                503,
                f"{MAX_MAPS} page maps are already open.",
                code="overloaded",
                headers=RETRY_SOON,
            )
        self._num_maps += 1

        async def close() -> None:
            self._num_maps -= 1

        return EventStream(
            partial(
                self.write_map,
                partial(run_fairly, request),
                PageMapFeed(_visibility(request)),
            ),
            close=close,
            failure=lambda error: named_event("error", error.body()),
        )

    async def write_map(self, run_fairly: RunFairly, page_map: PageMapFeed, write: Write) -> None:
        """Write events until the server ends. Takes a snapshot only if counters have changed."""
        seen = None
        try:
            while not self._drain.is_on:
                if seen is None or self._engine.stats() != seen.stats:
                    seen = await self._snapshots.take()
                # Also if nothing changed: the last event may not have had room for all changes.
                next_event: Work[bytes | None] = Work(
                    len(seen.pages) / _PAGES_PER_SECOND, partial(page_map.next_event, seen)
                )
                event = await run_fairly(next_event)
                if event is not None:
                    await write(event)
                await asyncio.sleep(MAP_INTERVAL)
        except MlxServeError as error:
            await write(named_event("error", from_engine(error).body()))


def _visibility(request: Request) -> Callable[[RequestView], bool]:
    """Return a predicate: which requests the sender of this one may see."""
    if is_admin(request):
        return lambda _: True
    own = key_id(request)
    return lambda live: live.client == own


def _card(live: RequestView) -> dict[str, Any]:
    return {
        "id": live.id,
        "object": "request",
        "key": None if live.client.startswith(ANONYMOUS) else live.client or None,
        "state": str(live.phase),
        "position": live.position,
        "num_computed": live.num_computed,
        "num_to_compute": live.num_to_compute,
        "prompt_tokens": live.num_prompt,
        "cached_tokens": live.num_cached,
        "output_tokens": live.num_outputs,
        "num_pages": len(live.page_table),
        "num_preemptions": live.num_preemptions,
        "priority": live.priority,
        "age_seconds": round(live.age, 3),
    }


def _kv_stats(snapshot: Snapshot) -> dict[str, Any]:
    stats = snapshot.stats
    total = len(snapshot.pages)
    count = {state.name.lower(): snapshot.num_pages(state) for state in PageState}
    queries, hits = stats.scheduler.prefix_queries, stats.scheduler.prefix_hits
    phases = [live.phase for live in snapshot.requests]
    return {
        "page_size": snapshot.page_size,
        "kv_cache_dtype": snapshot.memory.kv_cache_dtype,
        "pages": {
            "total": total,
            **count,
            "used": total - count["free"] - count["cached"] - count["stored"],
        },
        "bytes": {
            "kv_cache": snapshot.memory.kv_cache,
            "page": snapshot.memory.kv_cache // total,
            "active": snapshot.memory.active,
            "reserved": snapshot.memory.reserved,
            "peak": snapshot.memory.peak,
        },
        "prefix_cache": {
            "queries": queries,
            "hits": hits,
            "hit_rate": round(hits / queries, 4) if queries else 0.0,
        },
        "recurrent_states": {
            "slots": stats.states.num_slots,
            "snapshots": stats.states.num_snapshots,
            "restored": stats.states.num_restored,
            "evicted": stats.states.num_evicted,
        },
        "window_pages": {
            "total": stats.windows.num_pages,
            "used": stats.windows.num_used,
            "cached": stats.windows.num_cached,
            "evicted": stats.windows.num_evicted,
        },
        "disk_cache": {
            "state": DISK_STATES[stats.disk.state],
            "pages": stats.disk.num_pages,
            "bytes": stats.disk.num_bytes,
            "limit": stats.disk.limit,
            "read": stats.disk.num_read,
            "written": stats.disk.num_written,
            "lost": stats.disk.num_lost,
            "written_today": stats.disk.written_today,
            "read_rate": round(stats.disk.read_rate),
        },
        "page_store": {
            "state": DISK_STATES[stats.store.state],
            "pages": stats.store.num_pages,
            "bytes": stats.store.num_bytes,
            "read": stats.store.num_read,
            "written": stats.store.num_written,
            "lost": stats.store.num_lost,
            "written_today": stats.store.written_today,
            "read_rate": round(stats.store.read_rate),
        },
        "speculation": {
            "drafts": stats.scheduler.num_drafts,
            "drafted_tokens": stats.scheduler.drafted_tokens,
            "accepted_tokens": stats.scheduler.accepted_tokens,
            "reason": snapshot.no_draft_reason or None,
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

"""Snapshots of the engine for all watchers of a server."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from mlxserve.engine.snapshot import Snapshot

if TYPE_CHECKING:
    from mlxserve.engine.async_engine import AsyncEngine


class SharedSnapshots:
    """Snapshots of the engine, shared by all callers who wait for the same one.

    A caller never gets a snapshot that was requested before its call: after a resize has been
    confirmed, it must not see the state before it. Callers that arrive while a snapshot is being
    taken wait for the next one, together.

        take ──┐
        take ──┴─> requested ────────> taken
                      take ──┐
                      take ──┴─(lock)─> requested ────────> taken
    """

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._lock = asyncio.Lock()
        self._next: asyncio.Future[Snapshot] | None = None  # not requested yet

    async def take(self) -> Snapshot:
        """Return a snapshot taken after this call. Raises EngineStopped."""
        if self._next is None:
            self._next = asyncio.ensure_future(self._ask())
        # Shielded for the other callers, if this one is cancelled.
        return await asyncio.shield(self._next)

    async def _ask(self) -> Snapshot:
        async with self._lock:
            self._next = None
            return await self._engine.snapshot()

"""OutputStream: the outputs of a caller's requests, in its event loop."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from mlxserve.core.errors import EngineFailed, EngineStopped
from mlxserve.request import FinishReason, Output, Request

log = logging.getLogger("mlxserve.engine")


class Aborts(Protocol):
    """The part of AsyncEngine that aborts requests."""

    def abort(self, request_id: str, reason: FinishReason = ...) -> None: ...


class OutputStream:
    """The outputs of requests that were submitted together, in their caller's event loop.

    It ends when all requests have ended.
    """

    def __init__(self, engine: Aborts, requests: Sequence[Request]) -> None:
        self.loop = asyncio.get_running_loop()
        self._engine = engine
        self._live = {request.id for request in requests}
        # Not an asyncio.Queue: with one reader a deque and a future do, at half its time.
        self._items: deque[Output | EngineStopped | EngineFailed] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def __aiter__(self) -> AsyncIterator[Output]:
        return self

    async def __anext__(self) -> Output:
        """Return the next output.

        Raises EngineStopped if the engine ends before the requests do, and EngineFailed if a
        failure lost one of them; the others are then aborted.
        """
        while self._live:
            while not self._items:
                self._waiter = self.loop.create_future()
                await self._waiter
            item = self._items.popleft()
            if not isinstance(item, Output):
                self.close()
                raise item
            if item.request_id in self._live:
                if item.finish_reason is not None:
                    self._live.remove(item.request_id)
                return item
        raise StopAsyncIteration

    def finish(self, request_id: str, reason: FinishReason) -> None:
        """End one request at the next step boundary, for a reason of its reader.

        Its further outputs are dropped. No-op if it has ended.
        """
        if request_id in self._live:
            self._live.remove(request_id)
            self._engine.abort(request_id, reason)

    def close(self) -> None:
        """Abort the requests that have not ended."""
        for request_id in list(self._live):
            self.finish(request_id, FinishReason.ABORT)

    def deliver(self, item: Output | EngineStopped | EngineFailed) -> None:
        """Append an item. Called in the caller's event loop."""
        self._items.append(item)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def deliver_all(
    loop: asyncio.AbstractEventLoop,
    items: Sequence[tuple[OutputStream, Output | EngineStopped | EngineFailed]],
) -> None:
    """Deliver items in the event loop of their streams. Callable from any thread."""

    def deliver() -> None:
        for stream, item in items:
            stream.deliver(item)

    try:
        loop.call_soon_threadsafe(deliver)
    except RuntimeError:
        # The loop is closed, so these outputs have no reader.
        log.debug("outputs for a closed event loop are dropped")

"""LoadingStream: a stream of events that begins before its content is known.

A client that has asked for events waits while its model is loaded, for minutes if others use the
memory. Proxies and clients would give up: so the stream begins after ten seconds of silence, with
comments. The headers of the real reply then come too late, and a refusal becomes the last event.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Message, Scope, Send

from mlxserve.api.errors import speaks_anthropic
from mlxserve.api.server.in_flight import early_end
from mlxserve.api.server.sse import EVENT_HEADERS, KEEPALIVE, KEEPALIVE_INTERVAL

T = TypeVar("T")


class LoadingStream:
    """The reply to one request. Its route sends through `send`."""

    def __init__(self, scope: Scope, send: Send, interval: float = KEEPALIVE_INTERVAL) -> None:
        self.has_begun = False
        self._scope = scope
        self._send = send
        self._interval = interval
        self._is_refusal = False
        self._refusal: list[bytes] = []

    async def during(self, work: Coroutine[Any, Any, T]) -> T:
        """Await `work`, sending a comment after each `interval`.

        Raises the ApiError with which the server ends the request, once the stream has begun.
        """
        task, end = asyncio.ensure_future(work), early_end(self._scope)
        awaited: set[asyncio.Future[Any]] = {task, end}
        try:
            while not task.done():
                await asyncio.wait(
                    awaited, timeout=self._interval, return_when=asyncio.FIRST_COMPLETED
                )
                if end.done() and self.has_begun:
                    raise end.result()
                if not task.done():
                    await self._comment()
            return task.result()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _comment(self) -> None:
        if not self.has_begun:
            self.has_begun = True
            headers = [(name.encode(), value.encode()) for name, value in EVENT_HEADERS.items()]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        await self._send({"type": "http.response.body", "body": KEEPALIVE, "more_body": True})

    async def send(self, message: Message) -> None:
        """Pass on a route's message, without a second beginning."""
        if not self.has_begun:
            await self._send(message)
        elif message["type"] == "http.response.start":
            self._is_refusal = message["status"] != 200
        elif not self._is_refusal:
            await self._send(message)
        else:
            self._refusal.append(message.get("body", b""))
            if not message.get("more_body", False):
                name = b"event: error\n" if speaks_anthropic(self._scope) else b""
                event = name + b"data: " + b"".join(self._refusal) + b"\n\n"
                await self._send({"type": "http.response.body", "body": event})

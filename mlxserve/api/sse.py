"""Server-sent events: one frame, and the response that sends frames as they come.

Knows nothing of what the frames say. A frame is flushed as it is produced; while none comes, a
comment keeps proxies and impatient clients on the line; when the client goes away, the source of
the frames is closed at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from mlxserve.api.errors import encode_json

DONE = b"data: [DONE]\n\n"
KEEPALIVE = b": keepalive\n\n"  # a comment: named events without data break the official clients
KEEPALIVE_INTERVAL = 10.0  # seconds of silence

_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-store",
    "x-accel-buffering": "no",
}


def event(data: object) -> bytes:
    """One event. Its JSON holds no line break, so one `data:` line carries it."""
    return b"data: " + encode_json(data) + b"\n\n"


def named_event(name: str, data: object) -> bytes:
    """One event with a name. Never without data, which breaks the official clients."""
    return b"event: " + name.encode() + b"\n" + event(data)


class EventStream(Response):
    """Sends `frames`; `close` runs however the response ends, even before its first frame.

    keepalive: makes the frame sent after `interval` seconds of silence
    """

    def __init__(
        self,
        frames: AsyncGenerator[bytes, None],
        *,
        close: Callable[[], Awaitable[None]],
        headers: Mapping[str, str] | None = None,
        keepalive: Callable[[], bytes] = lambda: KEEPALIVE,
        interval: float = KEEPALIVE_INTERVAL,
    ) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers({**_HEADERS, **(headers or {})})
        self._frames = frames
        self._close = close
        self._keepalive = keepalive
        self._interval = interval

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        gone = asyncio.ensure_future(until_disconnect(receive))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await self._send_frames(send, gone)
        finally:
            await _end(gone)
            await self._frames.aclose()
            await self._close()

    async def _send_frames(self, send: Send, gone: asyncio.Future[None]) -> None:
        frame = asyncio.ensure_future(self._next())
        try:
            while True:
                waited: set[asyncio.Future[Any]] = {frame, gone}
                await asyncio.wait(
                    waited,
                    timeout=self._interval,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                if gone.done():
                    return
                if not frame.done():
                    await send(_body(self._keepalive()))
                    continue
                data = frame.result()
                if data is None:
                    await send({"type": "http.response.body", "body": b"", "more_body": False})
                    return
                await send(_body(data))
                frame = asyncio.ensure_future(self._next())
        finally:
            await _end(frame)

    async def _next(self) -> bytes | None:
        return await anext(self._frames, None)


async def until_disconnect(receive: Receive) -> None:
    """Returns when the client has gone away. The body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _end(task: asyncio.Future[Any]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def _body(data: bytes) -> dict[str, object]:
    return {"type": "http.response.body", "body": data, "more_body": True}

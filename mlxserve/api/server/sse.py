"""Server-sent events: one frame, and the response that sends frames as they come.

Knows nothing of what the frames say. A frame is flushed as it is produced; while none comes, a
comment keeps proxies and impatient clients on the line; when the client goes away, the source of
the frames is closed at once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any, TypeAlias

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from mlxserve.api.errors import encode_json

DONE = b"data: [DONE]\n\n"
KEEPALIVE = b": keepalive\n\n"  # a comment: named events without data break the official clients
KEEPALIVE_INTERVAL = 10.0  # seconds of silence
CHUNKS = "mlxserve.chunks"  # the extension of a scope whose server takes frames without ceremony
_PLACE = "\0"  # in no name of ours, nor in a model's

Write: TypeAlias = Callable[[bytes], Awaitable[None]]

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


class TextEvents:
    """Events that differ in one string: what is around it is encoded once, not for every token."""

    def __init__(self, make: Callable[[str], bytes]) -> None:
        """`make` makes the whole event, of a text that has to be escaped."""
        self._before, _, self._after = make(_PLACE).partition(encode_json(_PLACE))

    def of(self, text: str) -> bytes:
        return self._before + encode_json(text) + self._after


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
        self._is_sending = False
        self._sent_at = 0.0  # on the monotonic clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gone = asyncio.ensure_future(until_disconnect(receive))
        sending: asyncio.Future[None] | None = None
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            write = _writer(scope, send)
            sending = asyncio.ensure_future(self._send_frames(write, gone))
            await self._watch(write, sending, gone)
            if sending.done():
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            await _end(gone)
            if sending is not None:
                await _end(sending)
            await self._frames.aclose()
            await self._close()

    async def _send_frames(self, write: Write, gone: asyncio.Future[None]) -> None:
        """One task for all frames: a task and a timer for each would cost more than the frame."""
        async for frame in self._frames:
            await self._send(write, frame)
            if gone.done():  # a lost connection takes what is sent, without a word
                return

    async def _send(self, write: Write, frame: bytes) -> None:
        self._is_sending = True
        await write(frame)
        self._is_sending = False
        self._sent_at = time.monotonic()

    async def _watch(
        self, write: Write, sending: asyncio.Future[None], gone: asyncio.Future[None]
    ) -> None:
        """Until all is sent or nobody reads it. Speaks up where the frames have been silent."""
        self._sent_at = time.monotonic()
        while True:
            left = self._sent_at + self._interval - time.monotonic()
            done, _ = await asyncio.wait(
                {sending, gone}, timeout=max(left, 0), return_when=asyncio.FIRST_COMPLETED
            )
            if gone in done:
                return
            if sending in done:
                sending.result()
                return
            if self._is_sending:
                self._sent_at = time.monotonic()  # the silence is the reader's
            elif time.monotonic() - self._sent_at >= self._interval:
                await self._send(write, self._keepalive())


def _writer(scope: Scope, send: Send) -> Write:
    """What sends a frame of the reply that has begun: past the layers around us, if it can."""
    chunks = scope.get("extensions", {}).get(CHUNKS)
    if chunks is not None and chunks.are_expected:
        write: Write = chunks.write
        return write

    async def send_piece(frame: bytes) -> None:
        await send({"type": "http.response.body", "body": frame, "more_body": True})

    return send_piece


async def until_disconnect(receive: Receive) -> None:
    """Returns when the client has gone away. The body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _end(task: asyncio.Future[Any]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)

"""Server-sent events and lines of JSON: their encoding, and the response that sends them.

It does not know what events mean. An event is sent when it is written. While none is, a keepalive
holds the connection of proxies and impatient clients. When the client disconnects, the producer of
the events is cancelled at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from mlxserve.api.errors import ApiError, encode_json
from mlxserve.api.server.compression import GZIP_HEADERS, GzipStream
from mlxserve.api.server.in_flight import EarlyEnd, early_end

DONE = b"data: [DONE]\n\n"
KEEPALIVE = b": keepalive\n\n"  # a comment: named events without data break the official clients
KEEPALIVE_INTERVAL = 10.0  # seconds of silence
_SKIPPED = "mlxserve.skipped"  # in the scope of a stream
_PLACE = "\0"  # a text that occurs in no other part of an event

Write: TypeAlias = Callable[[bytes], Awaitable[None]]  # waits while the client does not read

EVENT_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-store",
    "x-accel-buffering": "no",
}


@dataclass(frozen=True, slots=True)
class StreamFormat:
    """The framing of a stream's events.

    skipped: bytes that clients ignore between two events
    """

    media_type: str
    skipped: bytes


EVENTS = StreamFormat("text/event-stream; charset=utf-8", KEEPALIVE)
# A space is part of the next line, whose JSON it precedes. An empty line would be one without JSON.
JSON_LINES = StreamFormat("application/x-ndjson", b" ")


def event(data: object) -> bytes:
    """Encode one event. Its JSON contains no line break, so it is one `data:` line."""
    return b"data: " + encode_json(data) + b"\n\n"


def named_event(name: str, data: object) -> bytes:
    """Encode one event with a name. It always has data, which the official clients require."""
    return named_event_of(name, encode_json(data))


def named_event_of(name: str, data: bytes) -> bytes:
    """Make an event of JSON that is encoded."""
    return b"event: " + name.encode() + b"\ndata: " + data + b"\n\n"


def json_line(data: object) -> bytes:
    """Encode one line of a stream in the format of JSON_LINES."""
    return encode_json(data) + b"\n"


class TextEvents:
    """Events that differ in one string: the JSON around it is encoded once, not for each token."""

    def __init__(self, make: Callable[[str], bytes]) -> None:
        """make: encodes the whole event with a given string."""
        self._before, _, self._after = make(_PLACE).partition(encode_json(_PLACE))

    def encode(self, text: str) -> bytes:
        return self._before + encode_json(text) + self._after


class EventStream(Response):
    """Sends the events that `produce` writes.

    produce: called with a function that sends encoded events; cancelled if the client disconnects
    close: runs however the response ends, even if `produce` never ran
    failure: makes the last event if the server has to end the request early
    keepalive: makes the event that is sent after `interval` seconds without one
    gzip: compresses the stream; None to send it as it is
    """

    def __init__(
        self,
        produce: Callable[[Write], Awaitable[None]],
        *,
        close: Callable[[], Awaitable[None]],
        failure: Callable[[ApiError], bytes],
        headers: Mapping[str, str] | None = None,
        keepalive: Callable[[], bytes] = lambda: KEEPALIVE,
        interval: float = KEEPALIVE_INTERVAL,
        framing: StreamFormat = EVENTS,
        gzip: GzipStream | None = None,
    ) -> None:
        self.status_code = 200
        self.background = None
        own = {"content-type": framing.media_type, **(GZIP_HEADERS if gzip else {})}
        self.init_headers({**EVENT_HEADERS, **own, **(headers or {})})
        self._skipped = gzip.skipped if gzip else framing.skipped
        self._gzip = gzip
        self._produce = produce
        self._close = close
        self._failure = failure
        self._keepalive = keepalive
        self._interval = interval

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gone = asyncio.ensure_future(until_disconnect(receive))
        end = early_end(scope)
        producing: asyncio.Future[None] | None = None
        is_closed = False
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            if self._gzip:
                head = self._gzip.encode(b"")
                await send({"type": "http.response.body", "body": head, "more_body": True})
            scope[_SKIPPED] = self._skipped  # from here on: nothing may come before gzip's header
            body = _Body(send, gone, self._gzip)
            # One task for all events: a task and a timer for each would cost more than the event.
            producing = asyncio.ensure_future(self._produce(body.write))
            await self._watch(body, producing, gone, end)
            if end.done() and not gone.done() and not producing.done():
                await _end(producing)
                is_closed = True
                # First, so that computing ends even if the client reads nothing.
                await self._close()
                with contextlib.suppress(ClientDisconnect):
                    await body.write(self._failure(end.result()))
            if producing.done():
                last = self._gzip.end() if self._gzip else b""
                await send({"type": "http.response.body", "body": last, "more_body": False})
        finally:
            await _end(gone)
            if producing is not None:
                await _end(producing)
            if not is_closed:
                await self._close()

    async def _watch(
        self,
        body: _Body,
        producing: asyncio.Future[None],
        gone: asyncio.Future[None],
        end: EarlyEnd,
    ) -> None:
        """Wait until all is sent, the client has gone or the request must end, sending keepalives."""
        awaited: set[asyncio.Future[Any]] = {producing, gone, end}
        while True:
            left = body.sent_at + self._interval - time.monotonic()
            done, _ = await asyncio.wait(
                awaited, timeout=max(left, 0), return_when=asyncio.FIRST_COMPLETED
            )
            if gone in done:
                return
            if producing in done:
                producing.result()
                return
            if end in done:
                return
            if body.is_sending:
                # The client is slow, not the producer.
                body.sent_at = time.monotonic()
            elif time.monotonic() - body.sent_at >= self._interval:
                await body.write(self._keepalive())


class _Body:
    """The body of a running response, and the time of its last write."""

    def __init__(self, send: Send, gone: asyncio.Future[None], gzip: GzipStream | None) -> None:
        self.is_sending = False
        self.sent_at = time.monotonic()
        self._send = send
        self._gone = gone
        self._gzip = gzip

    async def write(self, events: bytes) -> None:
        """Send events. Raises ClientDisconnect: a lost connection swallows writes without an error."""
        if not events:
            return
        self.is_sending = True
        body = self._gzip.encode(events) if self._gzip else events
        await self._send({"type": "http.response.body", "body": body, "more_body": True})
        self.is_sending = False
        self.sent_at = time.monotonic()
        if self._gone.done():
            raise ClientDisconnect


def skipped_by(scope: Mapping[str, Any]) -> bytes:
    """Bytes that the client of a stream ignores at any time; empty if there is no stream."""
    skipped: bytes = scope.get(_SKIPPED, b"")
    return skipped


async def until_disconnect(receive: Receive) -> None:
    """Wait until the client has disconnected. The request's body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _end(task: asyncio.Future[Any]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)

"""InProcess: requests that the server sends to itself, on behalf of a client that may have left.

An answer of a chat is a request like any other: it passes the same checks of the key, counts against
the same limits, waits in its client's turn, and ends with its key's revocation and the server's drain.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from contextvars import Context
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Scope

# Headers that belong to one body or one connection.
_OF_ONE_REQUEST = frozenset(
    (
        b"accept-encoding",
        b"connection",
        b"content-encoding",
        b"content-length",
        b"content-type",
        b"expect",
        b"transfer-encoding",
    )
)


@dataclass(frozen=True, slots=True)
class Sender:
    """The sender of a request: the head of it that tells who they are, and nothing of its body."""

    headers: tuple[tuple[bytes, bytes], ...]
    client: tuple[str, int] | None
    server: tuple[str, int | None] | None
    scheme: str
    http_version: str
    state: dict[str, Any]

    @classmethod
    def of(cls, request: Request) -> Sender:
        scope = request.scope
        headers = tuple(
            (name, value) for name, value in scope["headers"] if name.lower() not in _OF_ONE_REQUEST
        )
        return cls(
            headers,
            scope.get("client"),
            scope.get("server"),
            scope["scheme"],
            scope["http_version"],
            dict(scope.get("state", {})),
        )

    def scope(self, path: str, body: bytes) -> Scope:
        """Return the scope of a POST request with a JSON body."""
        own = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
        ]
        return {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": self.http_version,
            "method": "POST",
            "scheme": self.scheme,
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [*self.headers, *own],
            "client": self.client,
            "server": self.server,
            "state": dict(self.state),
        }


class InnerReply:
    """The reply to a request, as it arrives."""

    def __init__(self, task: asyncio.Task[None], messages: asyncio.Queue[Message]) -> None:
        self.status = 0
        self.is_whole = False
        self.headers: dict[str, str] = {}
        self._task = task
        self._messages = messages

    async def begin(self) -> None:
        """Wait for the status. Raises the error of the application if there is none."""
        message = await self._next()
        assert message is not None, "an application replies or raises"
        self.status = message["status"]
        self.headers = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in message["headers"]
        }

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield the body. Raises the error of the application."""
        while (message := await self._next()) is not None:
            yield message.get("body", b"")
            if not message.get("more_body", False):
                self.is_whole = True  # the application still tidies up
                return

    async def body(self) -> bytes:
        return b"".join([piece async for piece in self.pieces()])

    async def _next(self) -> Message | None:
        """Return the next message; None if the application has ended without another one."""
        if self._messages.empty() and not self._task.done():
            getting = asyncio.ensure_future(self._messages.get())
            try:
                await asyncio.wait({getting, self._task}, return_when=asyncio.FIRST_COMPLETED)
                if getting.done():
                    return getting.result()
            finally:
                getting.cancel()
        if not self._messages.empty():
            return self._messages.get_nowait()
        self._task.result()
        return None


class InProcess:
    """Sends requests to an application in this process."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    @asynccontextmanager
    async def post(self, sender: Sender, path: str, body: bytes) -> AsyncIterator[InnerReply]:
        """Send a POST request. Leaving before the end of its reply cancels it."""
        messages: asyncio.Queue[Message] = asyncio.Queue()
        requests: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Message:
            if requests:
                return requests.pop()
            nobody_leaves: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
            return await nobody_leaves

        async def send(message: Message) -> None:
            messages.put_nowait(message)

        # An empty context: the one of the request that began this one holds that request.
        running = self._app(sender.scope(path, body), receive, send)
        task = asyncio.get_running_loop().create_task(_run(running), context=Context())
        reply = InnerReply(task, messages)
        try:
            await reply.begin()
            yield reply
        finally:
            if not reply.is_whole:
                task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def _run(running: Any) -> None:
    await running

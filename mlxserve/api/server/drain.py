"""Drain: after the server is asked to stop, running answers may finish and new ones are refused.

A refusal is a 503 with Retry-After, so that clients try again when the next server runs. Reads are
still answered, and endless event streams are ended.
"""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Receive, Scope, Send

from mlxserve.api.errors import ApiError, error_response

_WORK = ("POST", "PUT")
_RETRY = {"retry-after": "5"}  # seconds; a guess of when the next server runs


class Drain:
    """Whether the server is stopping, and how many requests run. Used in the event loop only."""

    def __init__(self) -> None:
        self.is_on = False
        self.num_running = 0
        self._changed = asyncio.Event()

    def start(self) -> None:
        self.is_on = True

    def refusal(self) -> ApiError:
        return ApiError(
            503, "The server is stopping. Try again later.", code="draining", headers=_RETRY
        )

    def begin(self) -> None:
        self.num_running += 1

    def end(self) -> None:
        self.num_running -= 1
        self._changed.set()

    async def finished(self) -> None:
        """Returns when no request is running."""
        while self.num_running:
            self._changed.clear()
            await self._changed.wait()


class DrainCheck:
    """Counts running requests, and refuses new ones once the server is stopping."""

    def __init__(self, app: ASGIApp, drain: Drain) -> None:
        self._app = app
        self._drain = drain

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] not in _WORK:
            await self._app(scope, receive, send)
            return
        if self._drain.is_on:
            await error_response(self._drain.refusal())(scope, receive, send)
            return
        self._drain.begin()
        try:
            await self._app(scope, receive, send)
        finally:
            self._drain.end()

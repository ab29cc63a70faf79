"""Drain: the time between being asked to end and ending, in which answers under way may finish.

New work gets 503 with Retry-After, so that a client asks again when the next server runs; what
only watches is still answered, and those who watch for ever are sent away.
"""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Receive, Scope, Send

from mlxserve.api.errors import ApiError, error_response

_WORK = ("POST", "PUT")
_RETRY = {"retry-after": "5"}  # seconds; when the next server runs is not known here


class Drain:
    """Whether the server is ending, and how much work is under way. Lives in one event loop."""

    def __init__(self) -> None:
        self.is_on = False
        self.num_running = 0
        self._changed = asyncio.Event()

    def start(self) -> None:
        self.is_on = True

    def refusal(self) -> ApiError:
        return ApiError(
            503, "The server is ending. Ask again in a while.", code="draining", headers=_RETRY
        )

    def begin(self) -> None:
        self.num_running += 1

    def end(self) -> None:
        self.num_running -= 1
        self._changed.set()

    async def finished(self) -> None:
        """Returns when nothing is under way."""
        while self.num_running:
            self._changed.clear()
            await self._changed.wait()


class DrainCheck:
    """Counts work, and refuses it once the server is ending."""

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

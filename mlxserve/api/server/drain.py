"""Drain: after the server is asked to stop, running answers may finish and new ones are refused.

A refusal is a 503 with Retry-After, so that clients try again when the next server runs. Reads are
still answered, and endless event streams are ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from starlette.types import Scope

from mlxserve.api.errors import ApiError

_WORK = ("POST", "PUT")
_RETRY = {"retry-after": "5"}  # seconds; a guess of when the next server runs


class Drain:
    """Whether the server is stopping, and the number of running requests. For the event loop only."""

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

    @contextmanager
    def counted(self, scope: Scope) -> Iterator[None]:
        """Count a request until its reply is sent. Raises ApiError 503 for work while stopping."""
        if scope["method"] not in _WORK:
            yield
            return
        if self.is_on:
            raise self.refusal()
        self.num_running += 1
        try:
            yield
        finally:
            self.num_running -= 1
            self._changed.set()

    async def finished(self) -> None:
        """Wait until no request is running."""
        while self.num_running:
            self._changed.clear()
            await self._changed.wait()

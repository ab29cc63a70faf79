"""The requests in flight: each can be ended early, with an error that its client can read.

A stream ends with the error as its last event. A request without a reply yet is cancelled, wherever
it waits, and the error becomes its reply.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import TypeAlias

from starlette.types import Scope

from mlxserve.api.errors import ApiError

EarlyEnd: TypeAlias = asyncio.Future[ApiError]  # done once the request has to end


class InFlight:
    """The requests of one server, each with the key that sent it. Used in the event loop only."""

    def __init__(self) -> None:
        self._ends: dict[EarlyEnd, str] = {}  # with the digest of the key

    @contextlib.contextmanager
    def entered(self, key: str) -> Iterator[EarlyEnd]:
        """Register a request until its reply is sent."""
        end: EarlyEnd = asyncio.get_running_loop().create_future()
        self._ends[end] = key
        try:
            yield end
        finally:
            del self._ends[end]

    def end(self, error: ApiError, key: str | None = None) -> None:
        """End all requests, or those of the key with this digest."""
        for end, sender in self._ends.items():
            if not end.done() and key in (None, sender):
                end.set_result(error)


def early_end(scope: Scope) -> EarlyEnd:
    """The future of a request's early end, which never comes if the request was not registered."""
    end: EarlyEnd | None = scope.get("mlxserve.end")
    return asyncio.get_running_loop().create_future() if end is None else end

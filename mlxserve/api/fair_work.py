"""A request at the executor: its work before the engine, in its client's turn, until the client leaves."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Receive, Scope, Send

from mlxserve.api.access.security import client_name, has_key
from mlxserve.api.errors import ApiError
from mlxserve.api.server.retry_after import MAX_SECONDS, MIN_SECONDS
from mlxserve.api.server.sse import until_disconnect
from mlxserve.core.errors import ClientQueueFull, QueueFull
from mlxserve.helpers.fair_executor import BodyHold, BodyMemory, FairExecutor

T = TypeVar("T")

# In the scope of a request to a model: `(seconds) -> bool`, which sets how long it stays loaded without a use,
# and tells whether that is for the request to say.
KEEP_ALIVE = "mlxserve.keep_alive"
WAITED = "mlxserve.waited"  # in the scope of a request: seconds for which it waited for its model
_EXECUTOR, _HOLDS = "mlxserve.executor", "mlxserve.holds"  # in the scope of a request


class FairExecutorMiddleware:
    """Gives every request the executor, and gives the memory of its body and images back."""

    def __init__(self, app: ASGIApp, executor: FairExecutor) -> None:
        self._app = app
        self._executor = executor

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope[_EXECUTOR] = self._executor
        scope[_HOLDS] = []
        try:
            await self._app(scope, receive, send)
        finally:
            _close_holds(scope)


async def run_fairly(request: Request, seconds: float, work: Callable[[], T]) -> T:
    """The result of work that is expected to take these seconds. The body must have been read.

    Raises ApiError 429 and 503, ClientDisconnect, and what `work` raises.
    """
    executor: FairExecutor = request.scope[_EXECUTOR]
    try:
        return await cancel_on_disconnect(
            request, executor.run(client_name(request), seconds, work)
        )
    except QueueFull as error:
        raise refusal(error) from error


def body_hold(request: Request) -> BodyHold:
    """The memory of its body: held until `forget_body`, or until the reply has been sent."""
    return _hold(request, request.scope[_EXECUTOR].bodies)


def pixel_hold(request: Request) -> BodyHold:
    """The memory of its decoded images: as that of its body."""
    return _hold(request, request.scope[_EXECUTOR].pixels)


def _hold(request: Request, memory: BodyMemory) -> BodyHold:
    hold = memory.hold(client_name(request), has_key=has_key(request))
    request.scope[_HOLDS].append(hold)
    return hold


def forget_body(request: Request) -> None:
    """Its text has become tokens, which are few, and its images are the engine's."""
    _close_holds(request.scope)


def _close_holds(scope: Scope) -> None:
    for hold in scope[_HOLDS]:
        hold.close()


async def cancel_on_disconnect(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The work's result. Raises ClientDisconnect, and cancels the work, when the client leaves."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(until_disconnect(request.receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


def refusal(error: QueueFull) -> ApiError:
    """Of work that the executor has no room for."""
    seconds = min(max(error.seconds or 0.0, MIN_SECONDS), MAX_SECONDS)
    headers = {"retry-after": str(math.ceil(seconds)), "retry-after-ms": f"{seconds * 1e3:.0f}"}
    if isinstance(error, ClientQueueFull):
        return ApiError(429, str(error), code="too_many_requests", headers=headers)
    return ApiError(503, str(error), code="queue_full", headers=headers)

"""Runs a request's work before the engine on the executor, in its client's turn, until it leaves.

parse ──▶ conversation ──▶ render      one job, as long as all of it is as short as its first part;
  │            │                       what takes longer becomes a job of its own, in its own lane
  └──MoreWork──┘
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, TypeAlias, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.types import Scope

from mlxserve.api.access.security import client_name, has_key
from mlxserve.api.errors import ApiError
from mlxserve.api.server.retry_after import MAX_SECONDS, MIN_SECONDS
from mlxserve.api.server.sse import until_disconnect
from mlxserve.core.errors import ClientQueueFull, QueueFull
from mlxserve.helpers.fair_executor import (
    LONGEST_SECONDS,
    BodyHold,
    BodyMemory,
    FairExecutor,
    lane_of,
)

T = TypeVar("T")
ResultT = TypeVar("ResultT", covariant=True)
MadeT = TypeVar("MadeT")

# In the scope of a request to a model: `(seconds) -> str | None`, which sets how long it stays
# loaded without a use. It returns None, or the reason if the request may not decide this.
KEEP_ALIVE = "mlxserve.keep_alive"
# In the scope of a request to a model: when it was passed on (`perf_counter`), and the seconds for
# which it then waited for its model.
STARTED, WAITED = "mlxserve.started", "mlxserve.waited"
_EXECUTOR, _HOLDS = "mlxserve.executor", "mlxserve.holds"  # in the scope of a request
_GONE = "mlxserve.gone"  # in the scope of a request: done once its client has disconnected


@dataclass(frozen=True, slots=True)
class MoreWork(Generic[ResultT]):
    """The continuation that a job returns: work that is expected to take `seconds`.

    transforms: functions to apply to its result, in this order
    """

    seconds: float
    work: Callable[[], Any]
    transforms: tuple[Callable[[Any], Any], ...] = ()

    def then(self, make: Callable[[ResultT], MadeT]) -> MoreWork[MadeT]:
        """Append `make`, which is applied to the result."""
        return MoreWork(self.seconds, self.work, (*self.transforms, make))


Work: TypeAlias = T | MoreWork[T]  # a result, or what is left to do for it


def enter(scope: Scope, executor: FairExecutor) -> None:
    """Attach the executor to a request. `leave` must follow."""
    scope[_EXECUTOR] = executor
    scope[_HOLDS] = []


def leave(scope: Scope) -> None:
    """Release the memory of a request's body and images, and stop watching for its client."""
    _close_holds(scope)
    gone: asyncio.Future[None] | None = scope.get(_GONE)
    if gone is not None:
        gone.cancel()


async def run_fairly(request: Request, seconds: float, work: Callable[[], Work[T]]) -> T:
    """Run work of this expected duration in the client's turn. The body must have been read.

    A continuation (`MoreWork`) runs in the same job if the job stays short enough for its lane, and
    otherwise waits for a turn of its own. Raises ApiError 429 and 503, ClientDisconnect, and the
    errors of `work`.
    """
    executor: FairExecutor = request.scope[_EXECUTOR]
    client = client_name(request)
    result: Work[T] = MoreWork(seconds, work)
    try:
        while isinstance(result, MoreWork):
            job = executor.run(client, result.seconds, partial(_within_lane, result))
            result = await cancel_on_disconnect(request, job)
    except QueueFull as error:
        raise refusal(error) from error
    return result


def _within_lane(work: MoreWork[T]) -> Work[T]:
    """Run work and continuations on a thread of the executor, as long as the lane allows."""
    max_seconds, seconds, transforms = (
        LONGEST_SECONDS[lane_of(work.seconds)],
        work.seconds,
        work.transforms,
    )
    result = work.work()
    while isinstance(result, MoreWork):
        seconds += result.seconds
        transforms = (*result.transforms, *transforms)
        if seconds > max_seconds:
            return replace(result, transforms=transforms)
        result = result.work()
    for transform in transforms:
        result = transform(result)
    done: T = result
    return done


def body_hold(request: Request) -> BodyHold:
    """The memory of the request's body, held until `forget_body` or the end of the reply."""
    return _hold(request, request.scope[_EXECUTOR].bodies)


def pixel_hold(request: Request) -> BodyHold:
    """The memory of the request's decoded images, held as long as that of its body."""
    return _hold(request, request.scope[_EXECUTOR].pixels)


def _hold(request: Request, memory: BodyMemory) -> BodyHold:
    hold = memory.hold(client_name(request), has_key=has_key(request))
    request.scope[_HOLDS].append(hold)
    return hold


def forget_body(request: Request) -> None:
    """Release the memory of a body that has become tokens, which are few, and of its images."""
    _close_holds(request.scope)


def _close_holds(scope: Scope) -> None:
    for hold in scope[_HOLDS]:
        hold.close()


async def cancel_on_disconnect(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Await work, cancelling it when the client leaves. Raises ClientDisconnect."""
    task, gone = asyncio.ensure_future(work), _gone(request)
    awaited: set[asyncio.Future[Any]] = {task, gone}
    try:
        await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect
    finally:
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


def _gone(request: Request) -> asyncio.Future[None]:
    """A future that is done when the client has disconnected. One task watches per request."""
    gone: asyncio.Future[None] | None = request.scope.get(_GONE)
    if gone is None:
        gone = request.scope[_GONE] = asyncio.ensure_future(until_disconnect(request.receive))
    return gone


def refusal(error: QueueFull) -> ApiError:
    """Build the reply for work that the executor has no room for."""
    seconds = min(max(error.seconds or 0.0, MIN_SECONDS), MAX_SECONDS)
    headers = {"retry-after": str(math.ceil(seconds)), "retry-after-ms": f"{seconds * 1e3:.0f}"}
    if isinstance(error, ClientQueueFull):
        return ApiError(429, str(error), code="too_many_requests", headers=headers)
    return ApiError(503, str(error), code="queue_full", headers=headers)

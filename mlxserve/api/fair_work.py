"""The door: a request's work that is not constant time, in its client's turn, until it leaves.

parse ──▶ conversation ──▶ render      one job, as long as all of it is as short as its first part;
  │            │                       what takes longer becomes a job of its own, in its own lane
  └────Work────┘

Reading bodies, prompts, images, fetches, chats, loads, tools, Markdown, metrics and large replies:
a route hands each to `run_fairly`, and does nothing of it in the event loop.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope

from mlxserve.api.access.security import client_name, connection_name, has_key
from mlxserve.api.errors import ENCODE_FAIRLY, ApiError, encode_json
from mlxserve.api.server.retry_after import MAX_SECONDS, MIN_SECONDS
from mlxserve.api.server.sse import until_disconnect
from mlxserve.core.errors import ClientQueueFull, QueueFull
from mlxserve.helpers.fair_executor import (
    LONGEST_SECONDS,
    BodyHold,
    BodyMemory,
    FairExecutor,
    Lane,
    lane_of,
)
from mlxserve.helpers.work import MaybeWork, RunsIn, Work

T = TypeVar("T")

PROBE_SECONDS = 0.02  # for what a chat template can do, which is mostly known
_LOAD_SECONDS = 5.0  # of a model of some GB
ENCODE_SECONDS = 0.05  # of a large reply, some MiB; what it takes is charged
# In the scope of a request to a model: `(request, seconds) -> str | None`, which sets how long it
# stays loaded without a use. It returns None, or the reason if the request may not decide this.
KEEP_ALIVE = "mlxserve.keep_alive"
# In the scope of a request to a model: when it was passed on (`perf_counter`), and the seconds for
# which it then waited for its model.
STARTED, WAITED = "mlxserve.started", "mlxserve.waited"
_EXECUTOR, _HOLDS = "mlxserve.executor", "mlxserve.holds"  # in the scope of a request
_GONE = "mlxserve.gone"  # in the scope of a request: done once its client has disconnected


def attach(scope: Scope, executor: FairExecutor) -> None:
    """Attach the executor to a request, for `run_for_connection`."""
    scope[_EXECUTOR] = executor


def enter(scope: Scope, executor: FairExecutor) -> None:
    """Attach the executor to a request, for all of its work. `leave` must follow."""
    attach(scope, executor)
    scope[ENCODE_FAIRLY] = _encode_fairly
    scope[_HOLDS] = []


def leave(scope: Scope) -> None:
    """Release the memory of a request's body and images, and stop watching for its client."""
    _close_holds(scope)
    # Its context holds the scope.
    gone: asyncio.Future[None] | None = scope.pop(_GONE, None)
    if gone is not None:
        gone.cancel()


async def run_fairly(request: Request, work: Work[T], *, lane: Lane | None = None) -> T:
    """Run work in the client's turn. The body must have been read.

    What it returns to be continued (`Work`) runs in the same job if the job stays short enough for
    its lane, and otherwise waits for a turn of its own.

    lane: for work in the loop, if it is not WAITS

    Raises ApiError 429 and 503, ClientDisconnect, and the errors of the work.
    """
    executor: FairExecutor = request.scope[_EXECUTOR]
    client = client_name(request)
    result: MaybeWork[T] = work
    try:
        while isinstance(result, Work):
            if result.nbytes:
                body_hold(request).grow_to(result.nbytes)
            step = result
            if step.place is not RunsIn.LOOP:
                step = replace(step, run=partial(_within_lane, step), transforms=())
            result = await cancel_on_disconnect(request, executor.run(client, step, lane=lane))
            for transform in step.transforms:
                result = transform(result)
    except QueueFull as error:
        raise refusal(error) from error
    return result


async def run_for_connection(request: Request, work: Work[T]) -> T:
    """Run work of a request whose key is not known or whose body is not read, in its connection's turn.

    Raises ApiError 429 and 503, and the errors of the work.
    """
    executor: FairExecutor = request.scope[_EXECUTOR]
    try:
        return await executor.run(connection_name(request), work)
    except QueueFull as error:
        raise refusal(error) from error


def load_fairly(request: Request, load: Callable[[], Awaitable[T]]) -> Coroutine[Any, Any, T]:
    """Load a model, one at a time, in the client's turn. Raises the errors of `run_fairly`."""
    loading: Work[T] = Work(_LOAD_SECONDS, load, RunsIn.LOOP)
    return run_fairly(request, loading, lane=Lane.LOADS)


async def _encode_fairly(scope: Scope, receive: Receive, value: object) -> bytes:
    """Encode a large reply, whose size is known once it is encoded."""
    encoding: Work[bytes] = Work(ENCODE_SECONDS, partial(encode_json, value))
    return await run_fairly(Request(scope, receive), encoding)


def charge(executor: FairExecutor, scope: Scope, seconds: float) -> None:
    """Count seconds against the next work of a request's client."""
    executor.charge(client_name(Request(scope)), seconds)


def _within_lane(work: Work[T]) -> MaybeWork[T]:
    """Run work and what it returns to be continued, on one thread, as long as the lane allows."""
    max_seconds, seconds, transforms = (
        LONGEST_SECONDS[lane_of(work.seconds)],
        work.seconds,
        work.transforms,
    )
    result = work.run()
    while isinstance(result, Work):
        seconds += result.seconds
        transforms = (*result.transforms, *transforms)
        if seconds > max_seconds or result.nbytes or result.place is RunsIn.LOOP:
            return replace(result, transforms=transforms)
        result = result.run()
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
        # The traceback of the task's error holds this frame.
        del task, awaited


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

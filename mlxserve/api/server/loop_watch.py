"""LoopWatch: measures what holds the event loop, names the route, and charges its client.

    thread ── a beat ──▶ loop        not answered within 50 ms: the task that runs now holds it

Beats follow each other by 50 ms while there are requests, and by half a second while there are none.

Whatever takes long is work of the door (`mlxserve.api.fair_work`); this finds what was forgotten.
A task belongs to the request in whose context it was created. Seconds in which the process was
paused, or the loop waited for nobody, do not count.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from starlette.routing import BaseRoute, Match, Route
from starlette.types import Scope

from mlxserve.system.suspend_clock import RUNNING

TICK = 0.05  # seconds
IDLE_TICK = (
    0.5  # seconds, while there are no requests: an idle server wakes no processor 20 times a second
)
CONNECTIONS = "connections"  # what no request does: reading and writing of sockets
_UNKNOWN = "unknown"  # a path that no route has


@dataclass(slots=True)
class _Request:
    """A request. Contexts of its tasks outlive it: a cancelled timer keeps one until its time."""

    scope: Scope | None  # None once it has been answered


_request: ContextVar[_Request | None] = ContextVar("request", default=None)
# The request of each task; the watch looks at it from its own thread. A scope that stayed would keep
# its tasks, and these the scope.
_requests: WeakKeyDictionary[asyncio.Task[Any], _Request] = WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class Blocked:
    """The time for which the loop was held since the start.

    longest: seconds of the longest time, and its route
    """

    seconds: float = 0.0
    longest: float = 0.0
    longest_route: str | None = None

    def card(self) -> dict[str, Any]:
        return {
            "blocked_seconds": round(self.seconds, 3),
            "longest_seconds": round(self.longest, 3),
            "longest_route": self.longest_route,
        }


class LoopWatch:
    """Watches one event loop between `start` and `stop`."""

    def __init__(
        self,
        routes: Sequence[BaseRoute],
        charge: Callable[[Scope, float], None],
        tick: float = TICK,
        clock: Callable[[], float] = RUNNING.now,
    ) -> None:
        """Watch once started.

        charge: counts seconds against the client of a request; called from the watch's thread
        """
        self.blocked = Blocked()
        self._routes = routes
        self._charge = charge
        self._tick = tick
        self._clock = clock
        self._seconds: defaultdict[str, float] = defaultdict(float)  # by route
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_thread = 0
        self._stopping = threading.Event()

    @property
    def seconds_by_route(self) -> dict[str, float]:
        return dict(self._seconds)

    def start(self) -> None:
        """Start watching the running loop, on a thread of its own."""
        self.attach()
        self._stopping.clear()
        threading.Thread(target=self._run, name="mlxserve-loop-watch", daemon=True).start()

    def attach(self) -> None:
        """Name the tasks of the running loop by their requests, without watching it."""
        self._loop, self._loop_thread = asyncio.get_running_loop(), threading.get_ident()
        self._loop.set_task_factory(_task_of_request)  # type: ignore[arg-type]

    def stop(self) -> None:
        """Stop watching; the thread ends within a tick."""
        self._stopping.set()
        if self._loop is not None:
            self._loop.set_task_factory(None)

    def _run(self) -> None:
        while not self._stopping.wait(self._tick if _requests else IDLE_TICK) and self.look():
            pass

    def look(self) -> bool:
        """Send a beat, and wait until the loop answers; False once it has ended."""
        assert self._loop is not None, "the watch is started"
        beat = threading.Event()
        try:
            self._loop.call_soon_threadsafe(beat.set)
        except RuntimeError:  # it is closed
            return False
        began = last = self._clock()
        held: tuple[str, Scope | None] | None = None
        while not beat.wait(self._tick):
            if self._stopping.is_set():
                return False
            held, now = self._holder(), self._clock()
            self._count(held, now - last, now - began)
            last = now
        now = self._clock()
        self._count(held, now - last, now - began)
        return True

    def _holder(self) -> tuple[str, Scope | None] | None:
        """Return (route, its request) of what holds the loop; None if it only waits."""
        frame = sys._current_frames().get(self._loop_thread)  # noqa: SLF001  (documented)
        if frame is None or frame.f_code.co_name == "select":
            return None
        task = asyncio.current_task(self._loop)
        request = None if task is None else _requests.get(task)
        scope = None if request is None else request.scope
        return (CONNECTIONS if scope is None else self._route_of(scope)), scope

    def _route_of(self, scope: Scope) -> str:
        for route in self._routes:
            if isinstance(route, Route) and route.matches(scope)[0] is Match.FULL:
                return f"{scope['method']} {route.path}"
        return _UNKNOWN

    def _count(self, held: tuple[str, Scope | None] | None, seconds: float, so_far: float) -> None:
        if held is None:
            return
        route, scope = held
        self._seconds[route] += seconds
        known = self.blocked
        is_longest = so_far > known.longest
        self.blocked = Blocked(
            known.seconds + seconds,
            so_far if is_longest else known.longest,
            route if is_longest else known.longest_route,
        )
        if scope is not None:
            self._charge(scope, seconds)


@contextmanager
def tasks_of(scope: Scope) -> Iterator[None]:
    """Register the current task, and those that it creates, as the request's, until it is answered."""
    request = _Request(scope)
    _request.set(request)
    task = asyncio.current_task()
    assert task is not None
    _requests[task] = request
    try:
        yield
    finally:
        request.scope = None


def _task_of_request(
    loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, Any], **options: Any
) -> asyncio.Task[Any]:
    """Make a task that belongs to the request of the current context."""
    task = asyncio.Task(coroutine, loop=loop, **options)
    if (request := _request.get()) is not None:
        _requests[task] = request
    return task

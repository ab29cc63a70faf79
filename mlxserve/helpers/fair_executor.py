"""FairExecutor: runs the work before the engine fairly between clients.

Reading a large body, rendering, tokenising and compiling a grammar take seconds of a processor, and
anybody may ask for them. Each is a job of a client, and jobs take turns between clients:

    client A ── job, job ──┐            SHORT   four threads   what most requests need
    client B ── job ───────┼─▶ lanes ─▶ MEDIUM  one thread     up to a second
    client C ── job, job ──┘            LONG    one thread     more
                                        WAITS   no thread      fetches and tools: others work
                                        LOADS   no thread      models, one after the other

A job is described by its `Work`. A lane takes it by the seconds that it is expected to need, so that
a long one never stands before a short one. Within a lane, every client gets the same share of
seconds (`FairOrder`), and where there are several places, never all of them. What a job really took
is charged afterwards.

When the caller of `run` is cancelled, because its client has left, the job is removed; if it is
under way, a helper process that it waits for is killed (`mlxserve.helpers.waiting`), and a coroutine
is cancelled.

A client is an API key, or without keys a connection; the program itself is "", which is not
bounded.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import IntEnum
from functools import partial
from operator import itemgetter
from typing import Any, Generic, TypeVar

from mlxserve.core.errors import ClientQueueFull, EngineStopped, QueueFull
from mlxserve.helpers.waiting import while_wanted
from mlxserve.helpers.work import RunsIn, Work

T = TypeVar("T")

SHORT_SECONDS, MEDIUM_SECONDS = 0.25, 1.0  # the longest jobs of these lanes
# What may wait: jobs, and the seconds that they are expected to need.
MAX_JOBS, MAX_SECONDS = 2048, 300.0
MAX_CLIENT_JOBS, MAX_CLIENT_SECONDS = 1024, 60.0
# Bytes of all bodies that are being read or waiting.
BODY_MEMORY = 256 << 20
# Bytes of decoded images, for each of `body_memory`.
_PIXELS_PER_BODY = 6
# Bytes of each that are not counted, so that small ones always pass.
UNCOUNTED_BODY = 64 << 10
# Clients whose use is known, before those that have no debt are forgotten.
_MAX_DEBTORS = 4096


class Lane(IntEnum):
    """A queue of jobs of similar length."""

    SHORT = 0
    MEDIUM = 1
    LONG = 2
    WAITS = 3
    LOADS = 4


THREAD_LANES = (Lane.SHORT, Lane.MEDIUM, Lane.LONG)
LONGEST_SECONDS = {Lane.SHORT: SHORT_SECONDS, Lane.MEDIUM: MEDIUM_SECONDS, Lane.LONG: math.inf}
# Several for short jobs, as one may wait for a process that a template keeps busy.
_NUM_THREADS = {Lane.SHORT: 4, Lane.MEDIUM: 1, Lane.LONG: 1}
_NUM_PLACES = {**_NUM_THREADS, Lane.WAITS: 16, Lane.LOADS: 1}
# Places that one client may have at once: some are always left for others.
MAX_CLIENT_PLACES = {**_NUM_PLACES, Lane.SHORT: 3, Lane.WAITS: 8}


def lane_of(seconds: float) -> Lane:
    """Return the lane of a job with this expected duration."""
    if seconds <= SHORT_SECONDS:
        return Lane.SHORT
    return Lane.MEDIUM if seconds <= MEDIUM_SECONDS else Lane.LONG


class FairOrder(Generic[T]):
    """Items of several clients, in an order that gives every client the same share of seconds.

    An item is due when it would have been done if all clients were served at once, each at its share
    of the speed: at the time when the client's last one is due, or now, and the seconds it takes
    (weighted fair queueing; Demers, Keshav and Shenker, 1989).
    """

    def __init__(self) -> None:
        # Seconds that a client could have used since the beginning.
        self._now = 0.0
        self._used: dict[str, float] = {}  # when the last item of a client is due
        self._items: list[tuple[float, int, str, float, T]] = []  # a heap
        self._num_items: Counter[str] = Counter()  # items by client
        self._numbers = itertools.count()  # ties are broken by age

    def __len__(self) -> int:
        return len(self._items)

    def push(self, client: str, seconds: float, item: T) -> None:
        self.charge(client, seconds)
        entry = self._used[client], next(self._numbers), client, seconds, item
        heapq.heappush(self._items, entry)
        self._num_items[client] += 1

    def pop(self) -> T:
        return self._taken(heapq.heappop(self._items))

    def pop_first(self, may_start: Callable[[str], bool]) -> T | None:
        """Pop the first item whose client may start one; None if there is none."""
        if self._items and may_start(self._items[0][2]):
            return self.pop()
        entry = min((each for each in self._items if may_start(each[2])), default=None)
        if entry is None:
            return None
        self._items.remove(entry)
        heapq.heapify(self._items)
        return self._taken(entry)

    def _taken(self, entry: tuple[float, int, str, float, T]) -> T:
        _, _, client, seconds, item = entry
        self.pass_time(seconds / len(self._num_items))
        self._num_items[client] -= 1
        if not self._num_items[client]:
            del self._num_items[client]
        return item

    def sorted(self, items: Iterable[T], client_of: Callable[[T], str]) -> list[T]:
        """Sort items that were not pushed: the client that has used the least goes first."""
        used = [(self._used.get(client_of(item), 0.0), item) for item in items]
        used.sort(key=itemgetter(0))
        if used:
            self.pass_time(used[0][0] - self._now)
        return [item for _, item in used]

    def charge(self, client: str, seconds: float) -> None:
        """Count seconds, which may be negative, against a client's next items."""
        self._used[client] = max(self._used.get(client, 0.0), self._now) + seconds

    def pass_time(self, seconds: float) -> None:
        """Reduce every client's debt by these seconds."""
        self._now += max(seconds, 0.0)
        if len(self._used) > _MAX_DEBTORS:
            self._used = {who: used for who, used in self._used.items() if used > self._now}


@dataclass(eq=False, slots=True)
class _Job:
    client: str
    work: Work[Any]
    lane: Lane
    seconds: float  # expected
    own_seconds: float  # of a processor: in the loop, others work
    result: Future[Any] = field(default_factory=Future)  # for work in the loop: its turn
    has_left: bool = False  # its client
    began: float | None = None

    def is_wanted(self) -> bool:
        return not self.has_left


class FairExecutor:
    """The executor of a loaded model. Thread-safe, for any event loop."""

    def __init__(self, body_memory: int = BODY_MEMORY) -> None:
        self.bodies = BodyMemory(body_memory)
        self.pixels = BodyMemory(_PIXELS_PER_BODY * body_memory)
        self._lock = threading.Lock()
        self._orders = {lane: FairOrder[_Job]() for lane in Lane}
        self._num_free = dict(_NUM_PLACES)
        self._num_running: Counter[tuple[Lane, str]] = Counter()  # jobs of each client
        self._idle_since = dict.fromkeys(Lane, time.monotonic())
        self._threads = {
            lane: ThreadPoolExecutor(count, thread_name_prefix=f"mlxserve-{lane.name.lower()}")
            for lane, count in _NUM_THREADS.items()
        }
        self._waiting: set[_Job] = set()
        self._num_waiting: Counter[str] = Counter()  # jobs of each client
        self._seconds_waiting: dict[str, float] = {}
        self._is_closed = False

    @property
    def num_waiting(self) -> int:
        """Number of jobs that have not begun."""
        return len(self._waiting)

    async def run(self, client: str, work: Work[T], *, lane: Lane | None = None) -> T:
        """Run work in the client's turn, and return its result.

        lane: for work in the loop, if it is not WAITS

        Raises QueueFull, ClientQueueFull, EngineStopped, and what the work raises. Cancelling
        removes the job, kills the helper that it waits for, or cancels its coroutine.
        """
        in_loop = work.place is RunsIn.LOOP
        seconds = work.seconds
        if lane is None:
            lane = Lane.WAITS if in_loop else lane_of(seconds)
        job = _Job(client, work, lane, seconds, 0.0 if in_loop else seconds)
        self._enter(job)
        try:
            result: T = await asyncio.wrap_future(job.result)
            if in_loop:
                result = await work.run()
        except asyncio.CancelledError:
            self._leave(job)
            raise
        finally:
            if in_loop:
                self._end(job)
            # An error's traceback holds this frame, and the job holds the error.
            del job
        return result

    def charge(self, client: str, seconds: float) -> None:
        """Put the next jobs of a client behind those of others, by this many seconds."""
        with self._lock:
            for order in self._orders.values():
                order.charge(client, seconds)

    def close(self) -> None:
        """Refuse waiting and future jobs."""
        with self._lock:
            self._is_closed = True
            refused = list(self._waiting)
            for job in refused:
                self._forget(job)
        for job in refused:
            if job.result.set_running_or_notify_cancel():
                job.result.set_exception(EngineStopped("The engine was closed."))
        for threads in self._threads.values():
            threads.shutdown(wait=False)

    def _enter(self, job: _Job) -> None:
        with self._lock:
            if self._is_closed:
                raise EngineStopped("The engine was closed.")
            self._refuse_too_much(job)
            order = self._orders[job.lane]
            if not order and self._num_free[job.lane] == _NUM_PLACES[job.lane]:
                order.pass_time(time.monotonic() - self._idle_since[job.lane])
            order.push(job.client, job.seconds, job)
            self._waiting.add(job)
            self._num_waiting[job.client] += 1
            self._seconds_waiting[job.client] = (
                self._seconds_waiting.get(job.client, 0.0) + job.own_seconds
            )
            self._start(job.lane)

    def _refuse_too_much(self, job: _Job) -> None:
        if not job.client:
            return
        seconds = self._seconds_waiting.get(job.client, 0.0)
        if seconds >= MAX_CLIENT_SECONDS or self._num_waiting[job.client] >= MAX_CLIENT_JOBS:
            raise ClientQueueFull(
                "Requests of yours that take long to read are waiting already. Wait for some to "
                "finish.",
                seconds=seconds,
            )
        seconds = sum(self._seconds_waiting.values())
        if seconds >= MAX_SECONDS or len(self._waiting) >= MAX_JOBS:
            raise QueueFull("Too many requests are waiting to be read.", seconds=seconds)

    def _leave(self, job: _Job) -> None:
        job.has_left = True
        with self._lock:
            if job in self._waiting:
                self._forget(job)

    def _forget(self, job: _Job) -> None:
        """Mark a job as no longer waiting; its place in the order is skipped."""
        self._waiting.discard(job)
        self._num_waiting[job.client] -= 1
        self._seconds_waiting[job.client] -= job.own_seconds
        if not self._num_waiting[job.client]:
            del self._num_waiting[job.client], self._seconds_waiting[job.client]

    def _start(self, lane: Lane) -> None:
        """Start jobs while the lane has a free place. The lock is held."""
        order = self._orders[lane]
        while self._num_free[lane]:
            job = order.pop_first(partial(self._may_start, lane))
            if job is None:
                return
            if job not in self._waiting:
                order.charge(job.client, -job.seconds)
                continue
            self._forget(job)
            if job.result.set_running_or_notify_cancel():
                self._num_free[lane] -= 1
                self._num_running[lane, job.client] += 1
                job.began = time.monotonic()
                if job.work.place is RunsIn.LOOP:
                    job.result.set_result(None)
                else:
                    self._threads[lane].submit(self._work, [job])

    def _may_start(self, lane: Lane, client: str) -> bool:
        return not client or self._num_running[lane, client] < MAX_CLIENT_PLACES[lane]

    def _work(self, jobs: list[_Job]) -> None:
        """Run the one job of a list on a thread of the lane."""
        # An error's traceback holds this frame and the thread's, and the job holds the error. A
        # request in such a cycle would stay until garbage is collected.
        job = jobs.pop()
        result: Any = None
        error: BaseException | None = None
        try:
            with while_wanted(job.is_wanted):
                result = job.work.run()
        except BaseException as raised:  # noqa: BLE001  (raised again where the job was asked for)
            error = raised
        self._end(job)
        if error is None:
            job.result.set_result(result)
        else:
            job.result.set_exception(error)
        del job, error

    def _end(self, job: _Job) -> None:
        """Free the place of a job, if it has begun, and charge what it took."""
        if job.began is None:
            return
        now = time.monotonic()
        with self._lock:
            self._orders[job.lane].charge(job.client, now - job.began - job.seconds)
            self._num_free[job.lane] += 1
            self._num_running[job.lane, job.client] -= 1
            if not self._num_running[job.lane, job.client]:
                del self._num_running[job.lane, job.client]
            self._idle_since[job.lane] = now
            if not self._is_closed:
                self._start(job.lane)


class BodyMemory:
    """Memory budget for request bodies, or for images.

    A body counts while it is read, and until its text is tokenised.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._lock = threading.Lock()
        self._taken: Counter[str] = Counter()  # bytes by client

    @property
    def num_taken(self) -> int:
        return self._taken.total()

    def hold(self, client: str, *, has_key: bool) -> BodyHold:
        """Create the hold of one body, empty at first."""
        return BodyHold(self, client, 2 if has_key else 4)

    def take(self, client: str, size: int, part: int) -> None:
        """Take more bytes for a client. Raises QueueFull.

        It may have at most the `part`-th of what others leave, so that some is always left.
        """
        with self._lock:
            own = self._taken[client]
            left = self._size - self._taken.total() + own
            if own + size > left // part:
                message = "Other large requests are being read, and the memory for them is limited."
                raise QueueFull(message, seconds=1.0)
            self._taken[client] = own + size

    def give_back(self, client: str, size: int) -> None:
        with self._lock:
            self._taken[client] -= size
            if not self._taken[client]:
                del self._taken[client]


class BodyHold:
    """The memory of one body, released by `close`."""

    def __init__(self, memory: BodyMemory, client: str, part: int) -> None:
        self._memory = memory
        self._client = client
        self._part = part
        self._size = 0

    def grow_to(self, size: int) -> None:
        """Hold at least `size` bytes. Raises QueueFull."""
        more = size - UNCOUNTED_BODY - self._size
        if more > 0:
            self._memory.take(self._client, more, self._part)
            self._size += more

    def close(self) -> None:
        """Release all of it. Idempotent."""
        if self._size:
            self._memory.give_back(self._client, self._size)
            self._size = 0

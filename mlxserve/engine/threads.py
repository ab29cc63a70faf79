"""JobThread: a thread for mlx that outlives its jobs.

mlx keeps compiled functions, with Python objects in them, per thread and frees them when the
thread ends. If that happens while the interpreter shuts down, the process dies ("terminate called
without an active exception": ml-explore/mlx #4110, #4327; seen here at the exit of every second
script). So a thread that has computed something never ends: it waits for the next engine. There
are as many of these threads as engines were alive at the same time.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent import futures
from typing import TypeVar

T = TypeVar("T")

_SIGNAL_SECONDS = 0.2  # until a signal that came at a bad moment is handled


class JobThread:
    """Runs one job at a time on a daemon thread, and returns to its pool after each."""

    def __init__(self, pool: JobThreads) -> None:
        self._pool = pool
        self._jobs: queue.SimpleQueue[tuple[Callable[[], None], threading.Event]] = (
            queue.SimpleQueue()
        )
        self.thread = threading.Thread(target=self._run, name="mlxserve-engine", daemon=True)
        self.thread.start()

    def start(self, job: Callable[[], None]) -> threading.Event:
        """Start a job, which must not raise; the returned event is set when it has ended."""
        ended = threading.Event()
        self._jobs.put((job, ended))
        return ended

    def _run(self) -> None:
        while True:
            job, ended = self._jobs.get()
            job()
            # Free the job and its references.
            del job
            self._pool.put_back(self)
            ended.set()


class JobThreads:
    """A pool of idle threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[JobThread] = []

    def hire(self) -> JobThread:
        """Return the thread whose job ended last, or a new one."""
        with self._lock:
            if self._idle:
                return self._idle.pop()
        return JobThread(self)

    def put_back(self, thread: JobThread) -> None:
        with self._lock:
            self._idle.append(thread)


def result_of(future: futures.Future[T]) -> T:
    """Wait for a future while handling signals. Returns its result or raises its exception.

    Python handles signals between two instructions of the main thread. One that arrives when the
    last instruction before a wait without end has begun is handled after that wait.
    """
    while not futures.wait([future], _SIGNAL_SECONDS).done:
        pass
    return future.result()


THREADS = JobThreads()  # shared by all engines of the process

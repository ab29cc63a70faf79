"""Worker: a thread for mlx that outlives what runs on it.

mlx keeps compiled functions per thread, with Python objects in them, and frees them when the
thread ends. A thread that ends while the interpreter does so too kills the process ("terminate
called without an active exception": ml-explore/mlx #4110, #4327, seen here at the exit of every
second script). So a thread that has computed something is never ended: it waits for the next
engine, and there are as many of them as engines were alive at the same time.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

_lock = threading.Lock()
_idle: list[Worker] = []


class Worker:
    """Runs one job at a time on a daemon thread. Get one with `hire`; it frees itself."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[tuple[Callable[[], None], threading.Event]] = (
            queue.SimpleQueue()
        )
        self.thread = threading.Thread(target=self._run, name="mlxserve-engine", daemon=True)
        self.thread.start()

    def start(self, job: Callable[[], None]) -> threading.Event:
        """Begin a job, which must not raise; the event is set when it has ended."""
        ended = threading.Event()
        self._jobs.put((job, ended))
        return ended

    def _run(self) -> None:
        while True:
            job, ended = self._jobs.get()
            job()
            del job  # and with it what it held
            with _lock:
                _idle.append(self)
            ended.set()


def hire() -> Worker:
    """An idle worker, or a new one."""
    with _lock:
        if _idle:
            return _idle.pop()
    return Worker()

"""RunningClock: a clock without pauses of this process: stopped (Ctrl-Z), frozen, or asleep.

No clock of the system leaves them out: while a process is stopped all of them run, and while a
machine sleeps some do. A thread ticks instead, and a tick that comes late shows a pause. A call
that holds the interpreter's lock for as long looks the same.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

TICK = 0.5  # seconds
# Seconds between two ticks; a busy machine delays a thread by less.
SHORTEST_PAUSE = 2.0


class RunningClock:
    """Seconds that this process has run. Thread-safe. Without `start` pauses are not noticed."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, tick: float = TICK) -> None:
        """`tick`: seconds between two ticks."""
        self._clock = clock
        self._tick = tick
        self._ticked: float | None = None
        self._paused = 0.0  # seconds in all
        # Time at which the last pause was noticed.
        self._pause_ended = -math.inf
        self._lock = threading.Lock()

    def start(self) -> None:
        """Start ticking on a daemon thread. Idempotent."""
        with self._lock:
            if self._ticked is not None:
                return
            self._ticked = self._clock()
        threading.Thread(target=self._run, name="mlxserve-ticks", daemon=True).start()

    def tick(self) -> None:
        """Record that the process runs."""
        now = self.now()
        with self._lock:
            if self._ticked is not None:
                self._ticked = now + self._paused

    def now(self) -> float:
        """Seconds since an arbitrary moment, without pauses; a first call notices one."""
        with self._lock:
            now = self._clock()
            if self._ticked is not None and now - self._ticked > SHORTEST_PAUSE:
                self._paused += now - self._ticked
                self._ticked = self._pause_ended = now
            return now - self._paused

    def was_paused(self, seconds: float) -> bool:
        """True if there was a pause in the last `seconds` of the system's clock."""
        now = self.now()
        with self._lock:
            return now + self._paused - self._pause_ended <= seconds

    def _run(self) -> None:
        while True:
            time.sleep(self._tick)
            self.tick()


RUNNING = RunningClock()

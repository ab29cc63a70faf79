"""HardExit: ends the process when its orderly end takes too long.

A step that never ends, or a thread that is stuck in a library, would keep a process alive after the
answers to its clients have ended. Nothing in Python can end such a thread.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

_LOG_SECONDS = 1.0  # for a log whose reader has stopped reading


def _end_process() -> None:
    # The end was requested: a service manager must not restart the process.
    os._exit(0)


class HardExit:
    """A thread that waits for the earliest deadline."""

    def __init__(self, end: Callable[[], None] = _end_process) -> None:
        self._end = end
        self._deadlines: queue.SimpleQueue[float] = queue.SimpleQueue()
        threading.Thread(target=self._wait, name="mlxserve-last-resort", daemon=True).start()

    def end_within(self, seconds: float) -> None:
        """Set a deadline. Safe in a signal handler."""
        self._deadlines.put(time.monotonic() + seconds)

    def _wait(self) -> None:
        deadline = self._deadlines.get()
        while (left := deadline - time.monotonic()) > 0:
            try:
                deadline = min(deadline, self._deadlines.get(timeout=left))
            except queue.Empty:
                break
        saying = threading.Thread(target=self._say, daemon=True)
        saying.start()
        saying.join(_LOG_SECONDS)
        self._end()

    @staticmethod
    def _say() -> None:
        logger.error("The engine has not stopped in time; the process ends without it.")

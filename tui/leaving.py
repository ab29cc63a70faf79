"""Quits on a signal: in order, and within seconds in any case."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from threading import Timer
from types import FrameType

_HANG_UP_SECONDS = 3.0
_NUMBERS = (signal.SIGTERM, signal.SIGHUP)


class EndingSignals:
    """Calls `leave` in the event loop on SIGTERM and SIGHUP, until `restore`.

    Plain handlers, not the loop's: writing to a closed window ends Textual's writer thread. Its
    queue then fills up and blocks the event loop or the shutdown for ever, so after SIGHUP a timer
    ends the process.
    """

    def __init__(self, leave: Callable[[], None]) -> None:
        """Call this in the event loop in which `leave` is to run."""
        self._leave = leave
        self._loop = asyncio.get_running_loop()
        self._old = {number: signal.signal(number, self._on_signal) for number in _NUMBERS}

    def restore(self) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            deadline = Timer(_HANG_UP_SECONDS, os._exit, (128 + number,))
            deadline.daemon = True
            deadline.start()
        self._loop.call_soon_threadsafe(self._leave)

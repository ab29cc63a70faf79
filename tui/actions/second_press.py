"""A key that means something else when it is pressed twice."""

from __future__ import annotations

import time

SECONDS = 2.0  # within which a press is the second one


class SecondPress:
    """Of one key."""

    def __init__(self) -> None:
        self._last: float | None = None

    def forget(self) -> None:
        """Something else was done: the next press is a first one."""
        self._last = None

    def press(self) -> bool:
        """Note a press. Returns whether it follows another one."""
        now, last = time.monotonic(), self._last
        self._last = now
        return last is not None and now - last < SECONDS

"""SecondPress: gives a key another meaning when pressed twice."""

from __future__ import annotations

import time

SECONDS = 2.0  # time within which a press is the second one


class SecondPress:
    """The state of one key."""

    def __init__(self) -> None:
        self._last: float | None = None

    def forget(self) -> None:
        """Reset after another action: the next press is a first one."""
        self._last = None

    def press(self) -> bool:
        """Record a press; True if it follows another one."""
        now, last = time.monotonic(), self._last
        self._last = now
        return last is not None and now - last < SECONDS

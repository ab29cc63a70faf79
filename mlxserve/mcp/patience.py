"""Patience: the time that a call of a tool may take, which reports of progress extend."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

# A call that reports progress may take this many times its limit.
MAX_EXTENSION = 30


class Patience:
    """The limit counts from the last report of progress, or else from the beginning."""

    def __init__(self, seconds: float, clock: Callable[[], float]) -> None:
        self._seconds, self._clock = seconds, clock
        self._started = self._heard = clock()

    @property
    def left(self) -> float:
        """Seconds until the call is late."""
        latest = self._started + MAX_EXTENSION * self._seconds
        return min(self._heard + self._seconds, latest) - self._clock()

    async def extend(self, progress: float, total: float | None, message: str | None) -> None:
        """Note a report of progress, whatever it says."""
        del progress, total, message
        self._heard = self._clock()

    async def wait(self, calling: asyncio.Future[Any]) -> bool:
        """Wait for a call; True if it ended in time."""
        while not calling.done():
            if self.left <= 0:
                return False
            await asyncio.wait({calling}, timeout=self.left)
        return True

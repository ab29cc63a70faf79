"""Turnover: how fast places become free, and so when there is likely to be one where all are taken."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable

from mlxserve.api.errors import ApiError
from mlxserve.errors import QueueFull

_LAST = 32  # ends that count: the pace of now, not of the whole day
_LEAST, _MOST = 1.0, 60.0  # seconds that a client is told to wait


class Turnover:
    """One for each kind of place: answers, embeddings, connections. Lives in an event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ends: deque[float] = deque(maxlen=_LAST)

    def ended(self) -> None:
        """Something has made room."""
        self._ends.append(self._clock())

    def seconds(self) -> float:
        """Between one end and the next, by the last few; they may have stopped coming since."""
        if not self._ends:
            return _LEAST
        gap = (self._clock() - self._ends[0]) / len(self._ends)
        return min(max(gap, _LEAST), _MOST)

    def headers(self) -> dict[str, str]:
        seconds = self.seconds()
        return {"retry-after": str(math.ceil(seconds)), "retry-after-ms": f"{seconds * 1e3:.0f}"}

    def refusal(self, error: QueueFull) -> ApiError:
        return ApiError(503, str(error), code="queue_full", headers=self.headers())

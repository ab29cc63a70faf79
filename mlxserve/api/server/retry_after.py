"""The Retry-After header, estimated from how fast places have become free."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable

from mlxserve.api.errors import ApiError
from mlxserve.core.errors import QueueFull

_LAST = 32  # recent ends only: the current rate, not the whole day's
MIN_SECONDS, MAX_SECONDS = 1.0, 60.0  # seconds a client is told to wait


class RetryAfter:
    """Estimates when a place becomes free: for answers, embeddings or connections.

    Used in the event loop only.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ends: deque[float] = deque(maxlen=_LAST)

    def ended(self) -> None:
        """Record that a place became free."""
        self._ends.append(self._clock())

    def seconds(self) -> float:
        """The mean time between recent ends, including the time since the last one."""
        if not self._ends:
            return MIN_SECONDS
        gap = (self._clock() - self._ends[0]) / len(self._ends)
        return min(max(gap, MIN_SECONDS), MAX_SECONDS)

    def headers(self) -> dict[str, str]:
        seconds = self.seconds()
        return {"retry-after": str(math.ceil(seconds)), "retry-after-ms": f"{seconds * 1e3:.0f}"}

    def refusal(self, error: QueueFull) -> ApiError:
        return ApiError(503, str(error), code="queue_full", headers=self.headers())

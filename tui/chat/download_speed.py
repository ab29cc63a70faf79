"""DownloadSpeed: describes the size, speed and remaining time of a download."""

from __future__ import annotations

import time
from collections.abc import Callable

from mlxserve.hub.model_choices import Downloaded
from tui.chat.stats_text import format_seconds

_MIN_MEASURED = 1.0  # seconds of a download before its speed is shown


class DownloadSpeed:
    """Measures from its creation on; what an earlier run downloaded does not count."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._started = clock()
        self._first: int | None = None

    def describe(self, step: Downloaded) -> str:
        """Describe a step, such as `0.8 of 2.3 GB, 34 MB/s, 45 s left`, as far as known."""
        self._first = step.done if self._first is None else self._first
        seconds = self._clock() - self._started
        size = f"{step.done / 1e9:.1f} GB"
        if step.total is not None:
            size = f"{step.done / 1e9:.1f} of {step.total / 1e9:.1f} GB"
        rate = (step.done - self._first) / seconds if seconds > _MIN_MEASURED else 0.0
        if rate <= 0:
            return size
        left = (
            ""
            if step.total is None
            else f", {format_seconds((step.total - step.done) / rate)} left"
        )
        return f"{size}, {rate / 1e6:.0f} MB/s{left}"

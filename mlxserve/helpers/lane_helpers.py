"""LaneHelpers: helper processes of one kind, one for each lane of the executor.

A long job of one client does not hold the process that short jobs of others need.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from mlxserve.helpers.fair_executor import Lane
from mlxserve.helpers.helper import Helper


class LaneHelpers:
    """Helpers that are made when a lane first needs one. Thread-safe."""

    def __init__(self, make: Callable[[], Helper]) -> None:
        self._make = make
        self._helpers: dict[Lane, Helper] = {}
        self._lock = threading.Lock()

    def of(self, lane: Lane) -> Helper:
        """Return the helper of a lane."""
        with self._lock:
            if lane not in self._helpers:
                self._helpers[lane] = self._make()
            return self._helpers[lane]

    def close(self) -> None:
        """End the processes."""
        with self._lock:
            for helper in self._helpers.values():
                helper.close()

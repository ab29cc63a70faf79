"""MemoryWatch: how close this process is to the end of its memory, and the engine's measures.

    share of the memory in use            measure of the engine
    ─────────────── critical ────────     runs one request at a time, and preempts the others
    ─────────────── high ────────────     admits requests only while none runs; they wait
                                          returns memory that mlx and malloc keep, each second
    ─────────────────────────────────     none

The system's own memory pressure, which other programs may cause, raises the level as well: beside a
browser on 16 GB a Mac swaps before our share is high. A level ends when the share is HYSTERESIS
below its mark. One request always runs, so every answer ends. Pages of the cache stay: their memory
is one array per layer, and no part of an array can be returned without a resize.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from enum import IntEnum

log = logging.getLogger("mlxserve.memory")

INTERVAL = 1.0  # seconds between two readings
HYSTERESIS = 0.03  # of the memory


class MemoryLevel(IntEnum):
    """How short memory is."""

    NORMAL = 0
    HIGH = 1
    CRITICAL = 2


class MemoryWatch:
    """Watches the memory between steps, once a second, which takes 0.1 ms."""

    def __init__(
        self,
        read: Callable[[], float],
        *,
        high: float,
        critical: float,
        relieve: Callable[[], None] = lambda: None,
        pressure: Callable[[], int] = lambda: MemoryLevel.NORMAL,
    ) -> None:
        """Watch the share of memory in use.

        read: returns the share of memory in use, 0 to 1
        high, critical: marks of this share
        relieve: returns memory that is free but kept
        pressure: returns the system's memory pressure
        """
        self.share = 0.0
        self.level = MemoryLevel.NORMAL
        self._read = read
        self._marks = {MemoryLevel.HIGH: high, MemoryLevel.CRITICAL: critical}
        self._relieve = relieve
        self._pressure_of_system = pressure
        self._pressure = MemoryLevel.NORMAL
        self._next = 0.0

    def look(self, now: float) -> bool:
        """Read the share if a second has passed; True, with a line in the log, if the level changed."""
        if now < self._next:
            return False
        self._next = now + INTERVAL
        self.share, self._pressure = self._read(), MemoryLevel(self._pressure_of_system())
        if self._pressure or self.share >= self._marks[MemoryLevel.HIGH]:
            self._relieve()
            self.share = self._read()
        before, self.level = self.level, self._new_level()
        if self.level is before:
            return False
        say = log.warning if self.level > before else log.info
        why = ", and the system is short of memory" if self._pressure else ""
        used = 100 * self.share
        say("%.0f%% of the memory is in use here%s: %s", used, why, _MEASURES[self.level])
        return True

    def _new_level(self) -> MemoryLevel:
        def holds(level: MemoryLevel) -> bool:
            return self.share >= self._marks[level] - HYSTERESIS * (self.level >= level)

        return max([self._pressure, *filter(holds, self._marks)])


_MEASURES = {
    MemoryLevel.NORMAL: "requests are admitted as usual.",
    MemoryLevel.HIGH: "new requests wait until running ones have ended.",
    MemoryLevel.CRITICAL: "one request runs at a time, the others are preempted and wait.",
}

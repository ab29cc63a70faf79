"""DiskWrites: accepted records that are not on disk yet, and the bounds on writing.

accept ──▶ done             accepted until too much waits or the day's bound is reached
  └──────▶ failed           pending records are dropped; none is accepted for a minute
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from mlxserve.disk.record import HEADER_SIZE, ON_DISK, Wording

log = logging.getLogger("mlxserve.disk")

STAGED_BYTES = 256 << 20  # maximum in memory, waiting to be written
RETRY_SECONDS = 60.0  # after a write has failed


class DiskWrites:
    """Accepted records that are not on disk yet. Sizes in bytes."""

    def __init__(
        self,
        *,
        limit: int,
        daily_writes: int,
        clock: Callable[[], float],
        today: Callable[[], str],
        wording: Wording = ON_DISK,
    ) -> None:
        """Arguments are those of `Tier`."""
        self._words = wording
        self._limit, self._daily_writes = limit, daily_writes
        self._clock, self._today = clock, today
        self._staged: dict[bytes, int] = {}  # bytes of payloads by name
        self._staged_bytes = 0
        self._retry_at = 0.0
        self._warned: set[str] = set()
        # Day and total of the last write, by all processes.
        self._day, self._written_that_day = today(), 0
        # The last one on which no more was allowed.
        self._full_day = ""

    def __contains__(self, name: bytes) -> bool:
        return name in self._staged

    @property
    def num_bytes(self) -> int:
        """Bytes waiting to be written, approximately."""
        return self._staged_bytes

    @property
    def is_paused(self) -> bool:
        """True if a write failed so recently that none is accepted."""
        return self._clock() < self._retry_at

    @property
    def is_day_full(self) -> bool:
        """True if a record was refused because of today's bound."""
        return self._full_day == self._today()

    @property
    def written_today(self) -> int:
        """Bytes written today by all processes, as of the last `count`."""
        return self._written_that_day if self._day == self._today() else 0

    def accept(self, name: bytes, num_bytes: int) -> bool:
        """True if a record of `num_bytes` may be written. If not, the reason is logged once."""
        reason = self._refusal(num_bytes + HEADER_SIZE)
        if reason is not None:
            self._warn(*reason)
            return False
        self._staged[name] = num_bytes
        self._staged_bytes += num_bytes
        return True

    def done(self, name: bytes) -> None:
        """Mark a record as written."""
        self._drop(name)
        self._warned = {kind for kind in self._warned if kind.startswith("day")}

    def drop(self, names: Iterable[bytes]) -> None:
        """Drop pending records."""
        for name in names:
            self._drop(name)

    def failed(self, error: OSError) -> None:
        """Handle a failed write: accept none for a while."""
        self._retry_at = self._clock() + RETRY_SECONDS
        self._warn(str(error.errno), str(error))

    def clear(self) -> None:
        """Drop all pending records."""
        self._staged.clear()
        self._staged_bytes = 0

    def count(self, day: str, num_bytes: int) -> None:
        """Set the bytes that all processes have written on `day`, the day of the last write."""
        self._day, self._written_that_day = day, num_bytes

    def _drop(self, name: bytes) -> None:
        self._staged_bytes -= self._staged.pop(name)

    def _refusal(self, size: int) -> tuple[str, str] | None:
        """Return (kind, reason for the log) if `size` more bytes are refused; None otherwise."""
        if size > self._limit:
            return "size", f"a page of {size} bytes is more than {self._words.size_option} allows"
        if self._staged_bytes + size > STAGED_BYTES:
            return "speed", f"{self._words.subject} is slower than pages are computed"
        if self.written_today + self._staged_bytes + size > self._daily_writes:
            self._full_day = day = self._today()
            return f"day {day}", (
                f"{self._daily_writes} bytes were written on {day}; {self._words.writes_option} allows "
                "no more"
            )
        return None

    def _warn(self, kind: str, reason: str) -> None:
        """Log a warning, once per kind until a write succeeds."""
        if kind not in self._warned:
            self._warned.add(kind)
            log.warning("Pages are not kept %s: %s.", self._words.where, reason)

"""DiskWrites: the records that wait to be written, and how much may be.

    accept ──▶ next ──▶ done            accepted until too much waits or the day's bound is reached
                 └────▶ failed          all that waits is dropped; nothing is accepted for a minute

Touches no disk and has no lock: `DiskTier` calls it under its own.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable

from mlxserve.disk.files import HEADER_SIZE

log = logging.getLogger("mlxserve.disk")

STAGED_BYTES = 256 << 20  # maximum in memory, waiting to be written
RETRY_SECONDS = 60.0  # after a write has failed


class DiskWrites:
    """Records that were accepted and are not on disk yet, and what was written. Sizes in bytes."""

    def __init__(
        self,
        *,
        limit: int,
        daily_writes: int,
        clock: Callable[[], float],
        today: Callable[[], str],
    ) -> None:
        """
        limit: of all records on disk; a larger one is refused
        daily_writes: most bytes written in a day, by all processes
        """
        self._limit, self._daily_writes = limit, daily_writes
        self._clock, self._today = clock, today
        self._staged: OrderedDict[bytes, bytes] = OrderedDict()  # written in this order
        self._staged_bytes = 0
        self._retry_at = 0.0
        self._warned: set[str] = set()
        self._written_that_day = 0
        self._uncounted = 0
        self.day = today()  # of the last write
        self.num_written = 0  # since the start, as the next
        self.bytes_written = 0

    def __contains__(self, name: bytes) -> bool:
        return name in self._staged

    def __bool__(self) -> bool:
        return bool(self._staged)

    @property
    def is_paused(self) -> bool:
        """Whether a write has failed so recently that none is accepted."""
        return self._clock() < self._retry_at

    @property
    def written_today(self) -> int:
        """By every process, as far as `counted` was told."""
        return self._written_that_day if self.day == self._today() else 0

    def payload(self, name: bytes) -> bytes | None:
        return self._staged.get(name)

    def accept(self, name: bytes, payload: bytes) -> bool:
        """Have a record written. False, with a warning once, if there is a reason not to."""
        reason = self._refusal(len(payload) + HEADER_SIZE)
        if reason is not None:
            self._warn(*reason)
            return False
        self._staged[name] = payload
        self._staged_bytes += len(payload)
        return True

    def next(self) -> tuple[bytes, bytes] | None:
        """(name, payload) of the record to write now; it waits until it is `done`."""
        return next(iter(self._staged.items()), None)

    def done(self, name: bytes) -> None:
        """It is on disk."""
        num_bytes = len(self._staged.pop(name))
        self._staged_bytes -= num_bytes
        size = num_bytes + HEADER_SIZE
        self.num_written += 1
        self.bytes_written += size
        self._written_that_day = self.written_today + size
        self._uncounted += size
        self.day = self._today()
        self._warned = {kind for kind in self._warned if kind.startswith("day")}

    def failed(self, error: OSError) -> None:
        """A record could not be written: drop all, and accept none for a while."""
        self.clear()
        self._retry_at = self._clock() + RETRY_SECONDS
        self._warn(str(error.errno), str(error))

    def clear(self) -> None:
        """Drop what was not written."""
        self._staged.clear()
        self._staged_bytes = 0

    def pop_uncounted(self) -> int:
        """Bytes written since the last call, for the count that all processes share."""
        num_bytes, self._uncounted = self._uncounted, 0
        return num_bytes

    def counted(self, num_bytes: int) -> None:
        """All processes together have written `num_bytes` on `day`."""
        self._written_that_day = max(num_bytes, self._written_that_day)

    def _refusal(self, size: int) -> tuple[str, str] | None:
        """Why `size` more bytes cannot be accepted now: (kind, reason for the log); None if they can."""
        if size > self._limit:
            return "size", f"a page of {size} bytes is more than disk_cache_size allows"
        if self._staged_bytes + size > STAGED_BYTES:
            return "speed", "the disk is slower than pages are computed"
        if self.written_today + self._staged_bytes + size > self._daily_writes:
            day = self._today()
            return f"day {day}", (
                f"{self._daily_writes} bytes were written on {day}; disk_cache_daily_writes allows "
                "no more"
            )
        return None

    def _warn(self, kind: str, reason: str) -> None:
        """Log a warning, once of each kind until a write succeeds."""
        if kind not in self._warned:
            self._warned.add(kind)
            log.warning("Pages are not kept on disk: %s.", reason)

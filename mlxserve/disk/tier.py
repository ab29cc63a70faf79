"""Tier: an LRU cache of records by name, on disk (`DiskTier`) or in a store that several servers share.

    save ──▶ accepted ──▶ on disk ──▶ deleted for room, lost, or cleared
                │            │
    load ◀──────┴────────────┘           loads go before writes

    the caller's thread: Tier ────── messages ──▶ DiskThread, which owns the index and the files
                                  ◀── events ────

Each owns its state, so there is no lock. The caller sees the names that events have brought and
those that it has saved, and waits only in `wait`, `flush` and `close`. What a file holds is checked
when it is read, so a record comes back exactly as it was saved, or not at all. It is a cache: what
was not written when the process is killed is lost, and so is anything that the disk loses.

A disk that stands still is given up after STALL_SECONDS, once: every load is answered with no
records, and nothing is asked of it until it answers. Knows neither arrays nor requests.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from enum import IntEnum
from itertools import takewhile
from math import inf
from pathlib import Path
from queue import Empty

from mlxserve.core.errors import InvalidConfig
from mlxserve.disk.files import DiskFiles
from mlxserve.disk.loads import DiskAnswer, DiskLoads
from mlxserve.disk.record import HEADER_SIZE, Records
from mlxserve.disk.thread import (
    Delete,
    DiskNews,
    DiskThread,
    DiskUse,
    Message,
    Order,
    Record,
    Touch,
)
from mlxserve.disk.writes import DiskWrites
from mlxserve.system.suspend_clock import RUNNING

log = logging.getLogger("mlxserve.disk")

UNLIMITED = 1 << 62  # bytes of a tier that deletes nothing for room
STALL_SECONDS = 10.0  # one operation; then the disk is given up

# Takes the names of records that came (True) or went, and returns at once.
Listener = Callable[[Mapping[bytes, bool]], None]


def today_utc() -> str:
    """Return the day, as in 2026-12-31."""
    return datetime.now(UTC).date().isoformat()


class DiskState(IntEnum):
    """The disk's readiness for requests."""

    OFF = 0  # there is no disk cache
    WORKS = 1
    READS_ONLY = 2  # for a minute after a failed write, or until the next day
    STALLED = 3  # it does not answer
    FAILED = 4  # until a restart


class Tier:
    """Records of one identity, which other identities and processes may have beside them.

    Not thread-safe: all methods are for one thread.
    """

    def __init__(
        self,
        records: Records,
        *,
        limit: int,
        daily_writes: int,
        clock: Callable[[], float] = RUNNING.now,
        today: Callable[[], str] = today_utc,
        notify: Callable[[], None] | None = None,
    ) -> None:
        """Open the tier.

        records: access to them, by this tier alone
        limit: most bytes of all records, of all identities
        daily_writes: most bytes written in a day (UTC), by all processes
        notify: called on another thread when there is something new to `poll`

        Raises OSError if the records' place cannot be made or written to.
        """
        self._disk = DiskThread(records, limit, clock, today, notify)
        self._words = records.wording
        self.limit = limit
        self._clock = clock
        self._loads = DiskLoads()
        self._writes = DiskWrites(
            limit=limit,
            daily_writes=daily_writes,
            clock=clock,
            today=today,
            wording=self._words,
        )
        self._names: set[bytes] = set()  # own records on disk
        self._listener: Listener | None = None
        self._news: DiskNews  # the first one tells of the start
        self._num_messages = self._cleared_at = 0
        self._is_stalled = self._is_closed = self._has_ended = False
        self._take_all()
        self._thread = threading.Thread(target=self._disk.run, name=self._words.thread, daemon=True)
        self._thread.start()

    def report_to(self, listener: Listener) -> None:
        """Have `listener` called, on this thread, with each change of what `is_written` knows.

        A disk that does not answer for a while changes nothing.
        """
        self._listener = listener

    def __contains__(self, name: bytes) -> bool:
        """True if this record is known to exist."""
        return self._works() and (name in self._names or name in self._writes)

    def num_leading(self, names: Sequence[bytes], /) -> int:
        """Number of leading names whose records exist."""
        return sum(1 for _ in takewhile(self.__contains__, names))

    def is_written(self, name: bytes) -> bool:
        """True if this record exists and no longer waits to be written."""
        return self._works() and name in self._names

    @property
    def names(self) -> frozenset[bytes]:
        """Names of the records that exist, as far as is known."""
        return frozenset(self._names)

    @property
    def is_out(self) -> bool:
        """True while no record can be read or written."""
        return not self._works()

    @property
    def is_idle(self) -> bool:
        """True if nothing is left to be done of what was asked, or it cannot be done now."""
        return self._has_done_all()

    @property
    def accepts(self) -> bool:
        """True unless `save` refuses every record now."""
        return self._state() is DiskState.WORKS and not self._is_closed

    def keeps(self, num_bytes: int, used: float) -> bool:
        """True if a record of `num_bytes`, last used at `used`, would be kept if saved.

        That is, it fits or there are colder ones.
        """
        return self.coldest_kept(num_bytes) < used

    def coldest_kept(self, num_bytes: int) -> float:
        """Return the time before which a record of `num_bytes` must not have been used last to be kept.

        That is -inf if it fits, and inf if nothing could make room for it.
        """
        self._take_all()
        news, size = self._news, num_bytes + HEADER_SIZE
        if news.use.total_bytes + self._writes.num_bytes + size <= news.use.limit:
            return -inf
        return inf if news.coldest is None else news.coldest

    def save(
        self, records: Sequence[tuple[bytes, bytes]], used: Sequence[float] | None = None
    ) -> int:
        """Queue (name, payload) records to be written; return how many leading ones were accepted.

        Returns 0 while the disk accepts none. What is there already is accepted, and not written
        again. `used`: when each was used last, seconds since 1970; None for now. Those that are
        colder than all that is on a full disk are not written.
        """
        if not self._works() or self._is_closed or self._writes.is_paused:
            return 0
        used = used or [time.time()] * len(records)
        for num_taken, (name, payload) in enumerate(records):
            if name in self:
                continue
            if not self._writes.accept(name, len(payload)):
                return num_taken
            self._send(Record(name, payload, used[num_taken]))
        return len(records)

    def touch(self, used: Mapping[bytes, float]) -> None:
        """Update last-used times; unknown records are ignored."""
        if self._works() and (known := self._names & used.keys()):
            self._send(Touch({name: used[name] for name in known}))

    def load(self, names: Sequence[bytes]) -> int:
        """Start reading these records; return a ticket, by which `poll` returns them."""
        if not self._works() or self._is_closed:
            return self._loads.refuse()
        load = self._loads.add(names)
        self._send(load)
        return load.ticket

    def poll(self) -> list[DiskAnswer]:
        """Return the answers since the last call, each once."""
        self._works()  # or else all loads are answered
        return self._loads.poll()

    def wait(self, seconds: float) -> None:
        """Wait up to `seconds` until `poll` has an answer."""
        self._wait_for(lambda: not self._works() or self._loads.has_answers, seconds)

    def flush(self, seconds: float) -> bool:
        """Wait until the index is complete and all accepted records are written or dropped."""
        return self._wait_for(self._has_done_all, seconds)

    def delete(self, names: Sequence[bytes]) -> int:
        """Forget these records, delete their files soon, and return how many existed."""
        num_there = sum(map(self.__contains__, names))
        self._send(Delete(tuple(names)))
        self._forget(names)
        return num_there

    def clear(self) -> None:
        """Forget this identity's records; their files are deleted soon."""
        self._send(Order.CLEAR)
        self._cleared_at = self._num_messages
        self._forget(tuple(self._names))
        self._writes.clear()

    def use(self) -> DiskUse:
        """Return the current contents and counters."""
        state = self._state()
        use = replace(self._news.use, written_today=self._writes.written_today, state=int(state))
        if self._news.num_messages < self._cleared_at:
            use.num_pages = use.num_bytes = 0
        return use

    def _state(self) -> DiskState:
        if self._works():
            refuses = self._writes.is_paused or self._writes.is_day_full
            return DiskState.READS_ONLY if refuses else DiskState.WORKS
        return DiskState.FAILED if self._has_ended else DiskState.STALLED

    def close(self, seconds: float = 5.0) -> None:
        """Write accepted records for at most `seconds`, and end the thread. Idempotent."""
        self.flush(seconds)
        self._is_closed = True
        self._send(Order.CLOSE)
        self._thread.join(1.0)
        if self._thread.is_alive():
            log.warning("%s does not answer; some pages may not be written.", self._words.subject)

    def _has_done_all(self) -> bool:
        works, news = self._works(), self._news
        return not works or (news.is_idle and news.num_messages == self._num_messages)

    def _send(self, message: Message) -> None:
        self._disk.messages.put(message)
        self._num_messages += 1

    def _wait_for(self, is_done: Callable[[], bool], seconds: float) -> bool:
        end = time.monotonic() + seconds
        while not is_done():
            try:
                self._take(self._disk.events.get(timeout=max(0.0, end - time.monotonic())))
            except Empty:
                return is_done()
        return True

    def _works(self) -> bool:
        """True if the disk responds; gives it up if it stands still."""
        self._take_all()
        began = self._disk.began
        is_stalled = began is not None and self._clock() - began > STALL_SECONDS
        if is_stalled and not self._is_stalled:
            log.warning(
                "%s has not answered for %.0f s. Until it does, nothing is kept there "
                "and its pages are computed again",
                self._words.subject,
                STALL_SECONDS,
            )
            self._loads.answer_all()
            self._send(Order.GIVE_UP)
        elif self._is_stalled and not is_stalled:
            log.info("%s answers again", self._words.subject)
        self._is_stalled = is_stalled
        return not (self._has_ended or is_stalled or self._news.is_out)

    def _forget(self, names: Collection[bytes]) -> None:
        self._names.difference_update(names)
        if self._listener is not None:
            self._listener(dict.fromkeys(names, False))

    def _take_all(self) -> None:
        while not self._disk.events.empty():
            self._take(self._disk.events.get())

    def _take(self, event: DiskAnswer | DiskNews | None) -> None:
        if isinstance(event, DiskAnswer):
            self._loads.answer(event)
        elif event is None:
            self._has_ended = True
            self._forget(tuple(self._names))
            self._writes.clear()
            self._loads.answer_all()
        else:
            self._news = event
            self._writes.count(event.day, event.use.written_today)
            is_old = event.num_messages < self._cleared_at
            changes = {} if is_old else event.changes
            for name, is_there in changes.items():
                (self._names.add if is_there else self._names.discard)(name)
                if is_there and name in self._writes:
                    self._writes.done(name)
            if changes and self._listener is not None:
                self._listener(changes)
            self._writes.drop(() if is_old else event.dropped)
            if event.error is not None:
                self._writes.failed(event.error)


class DiskTier(Tier):
    """A tier of files below `base`, which other identities and processes may share."""

    def __init__(
        self,
        base: Path,
        *,
        identity: bytes,
        limit: int,
        daily_writes: int,
        model: str = "",
        payload_sizes: Collection[int] | None = None,
        files: DiskFiles | None = None,
        clock: Callable[[], float] = RUNNING.now,
        today: Callable[[], str] = today_utc,
        notify: Callable[[], None] | None = None,
    ) -> None:
        """Open the tier.

        identity: 16 bytes; records of another one are never read
        model: its name, for people who look into the folder
        payload_sizes: allowed sizes of records in bytes; None allows any
        files: what accesses the disk, for tests

        The others are those of `Tier`. Raises InvalidConfig if the folder cannot be created or written to.
        """
        files = files or DiskFiles(base, identity, model, payload_sizes)
        try:
            super().__init__(
                files,
                limit=limit,
                daily_writes=daily_writes,
                clock=clock,
                today=today,
                notify=notify,
            )
        except OSError as error:
            raise InvalidConfig(
                f"the disk cache cannot be in {base}: {error}. Choose another disk_cache_dir, or "
                "disk_cache_size=0."
            ) from error
        self.folder = files.folder  # folder of this identity

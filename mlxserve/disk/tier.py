"""DiskTier: records on disk by their names, until they are the least recently used of too many.

    save ──▶ staged ──▶ on disk ──▶ deleted for room, lost, or cleared
                │           │
    load ◀──────┴───────────┘          loads go before writes

One named thread does all that touches the disk; callers see an index in memory and never wait, but
in `wait`, `flush` and `close`. The index is built from names and sizes; what a file holds is checked
when it is read, so a record comes back exactly as it was saved, or not at all. It is a cache: what
was not written when the process is killed is lost, and so is anything that the disk loses. This file
has the thread and its lock; what waits, and the index, are in `DiskWrites`, `DiskLoads`, `DiskIndex`.

A disk that stands still is given up after STALL_SECONDS, once: every load is answered with nothing,
and nothing is asked of it until it answers. Knows neither arrays nor requests.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice, takewhile
from pathlib import Path

from mlxserve.disk.files import HEADER_SIZE, DiskFiles, FoundFile, UnsoundRecord
from mlxserve.disk.index import DiskIndex
from mlxserve.disk.loads import DiskAnswer, DiskLoad, DiskLoads
from mlxserve.disk.writes import DiskWrites
from mlxserve.errors import InvalidConfig

log = logging.getLogger("mlxserve.disk")

STALL_SECONDS = 10.0  # of one operation; then the disk is given up
_PASSING = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EINTR, errno.EAGAIN)
_SCAN_FILES = 256  # added to the index at once
_SCAN_SECONDS = 60.0  # after which sizes are looked up again before anything is deleted
_ROOM = 0.05  # of the limit that is made free at once


@dataclass(frozen=True, slots=True)
class DiskUse:
    """What is on disk, and what was done since the start. Sizes in bytes."""

    limit: int
    num_pages: int = 0  # of this identity, as the next three
    num_bytes: int = 0
    num_read: int = 0
    num_written: int = 0
    num_lost: int = 0  # asked for, and missing, cut off, damaged or foreign
    num_deleted: int = 0  # for room, of any identity
    total_bytes: int = 0  # of all identities, as of the last look
    bytes_read: int = 0
    bytes_written: int = 0
    written_today: int = 0  # by every process
    read_rate: float = 0.0  # bytes per second of recent reads; 0 before the first


class DiskTier:
    """Records of one identity below `base`, which other identities and processes may share."""

    def __init__(
        self,
        base: Path,
        *,
        identity: bytes,
        limit: int,
        daily_writes: int,
        model: str = "",
        files: DiskFiles | None = None,
        clock: Callable[[], float] = time.monotonic,
        today: Callable[[], str] = lambda: datetime.now(UTC).date().isoformat(),
    ) -> None:
        """
        identity: 16 bytes; records of another one are never read
        limit: most bytes below `base`, of all identities
        daily_writes: most bytes written in a day (UTC), by all processes
        model: its name, for people who look into the folder
        files: what accesses the disk, for tests

        Raises InvalidConfig if the folder cannot be made or written to.
        """
        self._files = files or DiskFiles(base, identity, model)
        self._clock = clock
        self._limit = limit
        try:
            self._files.prepare()
        except OSError as error:
            raise InvalidConfig(
                f"the disk cache cannot be in {base}: {error}. Choose another disk_cache_dir, or "
                "disk_cache_size=0."
            ) from error
        # The rest is for both threads, under `_change`.
        self._change = threading.Condition()
        self._index = DiskIndex()
        self._loads = DiskLoads()
        self._writes = DiskWrites(limit=limit, daily_writes=daily_writes, clock=clock, today=today)
        self._writes.counted(self._files.written(self._writes.day))
        self._is_clearing = False
        self._generation = 0  # how often the index was cleared
        self._scanned_at: float | None = None
        self._began: float | None = None  # the operation that is under way
        self._is_stalled = False
        self._has_warned_of_loss = False  # since the last write
        self._num_lost = self._num_deleted = 0
        self._is_alive = True
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="mlxserve-disk", daemon=True)
        self._thread.start()

    @property
    def folder(self) -> Path:
        """Of this identity."""
        return self._files.folder

    @property
    def is_alive(self) -> bool:
        """Whether its thread runs. A bug ends it; errors of the disk do not."""
        with self._change:
            return self._is_alive

    def num_leading(self, names: Sequence[bytes], /) -> int:
        """How many of these records are there, from the first one on."""
        with self._change:
            if not self._works():
                return 0
            return sum(1 for _ in takewhile(self._has, names))

    def known(self, names: Iterable[bytes]) -> list[bool]:
        """Which of these records are there."""
        with self._change:
            return [self._has(name) for name in names]

    def save(self, records: Sequence[tuple[bytes, bytes]]) -> int:
        """Have records written: (name, payload). How many are accepted, from the first one on.

        None while the disk does not take any. What is there already is accepted, and not written
        again.
        """
        with self._change:
            if not self._works() or self._is_closed or self._writes.is_paused:
                return 0
            num_taken = 0
            for name, payload in records:
                if not self._has(name) and not self._writes.accept(name, payload):
                    break
                num_taken += 1
            self._change.notify_all()
            return num_taken

    def load(self, names: Sequence[bytes]) -> int:
        """Start to read these records; a ticket, by which `poll` returns them."""
        with self._change:
            is_read = self._works() and not self._is_closed
            ticket = self._loads.add(names) if is_read else self._loads.refuse()
            self._change.notify_all()
            return ticket

    def poll(self) -> list[DiskAnswer]:
        """The answers since the last call, each once."""
        with self._change:
            self._works()  # or else all loads are answered
            return self._loads.poll()

    def wait(self, seconds: float) -> None:
        """Wait until `poll` has something to return, for at most `seconds`."""
        with self._change:
            self._change.wait_for(lambda: self._loads.has_answers or not self._works(), seconds)

    def flush(self, seconds: float) -> bool:
        """Wait until the index is complete and all that was accepted is written or given up."""
        with self._change:
            return self._change.wait_for(lambda: self._is_idle() or not self._works(), seconds)

    def clear(self) -> None:
        """Forget this identity's records; their files are deleted soon."""
        with self._change:
            self._generation += 1
            self._index = DiskIndex()
            self._scanned_at = None  # what is left of the others is found again
            self._writes.clear()
            self._is_clearing = True
            self._change.notify_all()

    def use(self) -> DiskUse:
        """As of now."""
        with self._change:
            index, loads, writes = self._index, self._loads, self._writes
            return DiskUse(
                self._limit,
                num_pages=len(index.names),
                num_bytes=index.num_bytes,
                num_read=loads.num_read,
                num_written=writes.num_written,
                num_lost=self._num_lost,
                num_deleted=self._num_deleted,
                total_bytes=index.total,
                bytes_read=loads.bytes_read,
                bytes_written=writes.bytes_written,
                written_today=writes.written_today,
                read_rate=loads.read_rate,
            )

    def close(self, seconds: float = 5.0) -> None:
        """Write what was accepted, for at most so long, and end the thread. Idempotent."""
        self.flush(seconds)
        with self._change:
            self._is_closed = True
            self._change.notify_all()
        self._thread.join(1.0)
        if self._thread.is_alive():
            log.warning("The disk does not answer; some pages may not be written.")

    # ---- under the lock

    def _has(self, name: bytes) -> bool:
        return name in self._index.names or name in self._writes

    def _works(self) -> bool:
        """Gives the disk up if it stands still."""
        if not self._is_alive:
            return False
        if self._began is not None and not self._is_stalled:
            self._is_stalled = self._clock() - self._began > STALL_SECONDS
            if self._is_stalled:
                log.warning(
                    "The disk has not answered for %.0f s. Until it does, nothing is kept there "
                    "and its pages are computed again",
                    STALL_SECONDS,
                )
                self._answer_all()
        return not self._is_stalled

    def _answer_all(self) -> None:
        """Answer every load with nothing."""
        self._loads.answer_all()
        self._change.notify_all()

    def _is_idle(self) -> bool:
        is_scanned = self._scanned_at is not None
        return is_scanned and not (self._writes or self._loads.are_waiting or self._is_clearing)

    def _has_to_do(self) -> bool:
        is_too_much = self._index.total > self._limit
        return self._is_closed or not self._is_idle() or is_too_much

    # ---- on the thread

    def _run(self) -> None:
        try:
            while True:
                with self._change:
                    self._change.wait_for(self._has_to_do)
                    if self._is_closed:
                        break
                self._turn()
            self._count_writes()
        except Exception:
            log.exception("The disk cache has failed; nothing is kept on disk from now on")
        finally:
            with self._change:
                self._is_alive = False
                self._index = DiskIndex()
                self._writes.clear()
                self._answer_all()

    def _turn(self) -> None:
        """The most urgent of what is to be done."""
        with self._change:
            load, staged = self._loads.pop(), self._writes.next()
            is_clearing, is_scanned = self._is_clearing, self._scanned_at is not None
        if load is not None:
            self._read(load)
        elif is_clearing:
            self._delete_all()
        elif not is_scanned:
            self._scan()
        elif staged is not None:
            self._write(*staged)
        else:
            self._make_room(0)

    @contextmanager
    def _operation(self) -> Iterator[None]:
        """One access to the disk, after which a disk that was given up counts as working again."""
        with self._change:
            self._began = self._clock()
        try:
            yield
        finally:
            with self._change:
                self._began = None
                if self._is_stalled:
                    self._is_stalled = False
                    log.info("The disk answers again")
                self._change.notify_all()

    def _read(self, load: DiskLoad) -> None:
        payloads: list[bytes] = []
        num_bytes, seconds = 0, 0.0
        for name in load.names:
            with self._change:
                if not self._loads.is_waiting(load):
                    return  # it was given up
                payload = self._writes.payload(name)
            if payload is None:
                began = time.perf_counter()
                payload = self._read_one(name)
                seconds += time.perf_counter() - began
                num_bytes += len(payload or b"")
            if payload is None:
                break
            payloads.append(payload)
        with self._change:
            self._loads.answer(load, payloads, num_bytes=num_bytes, seconds=seconds)
            self._change.notify_all()

    def _read_one(self, name: bytes) -> bytes | None:
        """None if it cannot be read; it is forgotten, unless only this process lacks something."""
        try:
            with self._operation():
                payload = self._files.read(name)
            with self._change:
                size = len(payload) + HEADER_SIZE
                self._index.add(FoundFile(self._files.path(name), size, time.time()), name)
            return payload
        except (OSError, UnsoundRecord) as error:
            if isinstance(error, OSError) and error.errno in _PASSING:
                log.debug("A page cannot be read now: %s", error)
                return None
            with self._change:
                self._index.remove(self._files.path(name), name)
                self._num_lost += 1
                if not isinstance(error, FileNotFoundError) and not self._has_warned_of_loss:
                    self._has_warned_of_loss = True
                    log.warning("A page on disk cannot be used and is computed again: %s", error)
        self._delete(self._files.path(name))
        return None

    def _write(self, name: bytes, payload: bytes) -> None:
        size = len(payload) + HEADER_SIZE
        with self._change:
            generation = self._generation
        self._make_room(size)
        try:
            with self._operation():
                self._files.write(name, payload)
        except OSError as error:
            with self._change:
                self._writes.failed(error)
                self._change.notify_all()
            return
        with self._change:
            if generation != self._generation:
                return  # cleared meanwhile, and its file is deleted with the others
            self._writes.done(name)
            path = self._files.path(name)
            self._index.add(FoundFile(path, size, time.time()), name)
            self._has_warned_of_loss = False
            is_last = not self._writes
            self._change.notify_all()
        if is_last:
            self._count_writes()

    def _count_writes(self) -> None:
        with self._change:
            day, num_bytes = self._writes.day, self._writes.pop_uncounted()
        if not num_bytes:
            return
        try:
            with self._operation():
                written = self._files.add_written(day, num_bytes)
        except OSError as error:
            log.debug("Bytes written today are not counted: %s", error)
            return
        with self._change:
            self._writes.counted(written)

    def _scan(self) -> None:
        """Learn what is on disk, a few files at a time, so that loads do not wait."""
        with self._change:
            generation = self._generation
        found: dict[Path, FoundFile] = {}
        try:
            files = self._files.scan()
            while True:
                with self._operation():
                    part = list(islice(files, _SCAN_FILES))
                if not part:
                    break
                found.update((file.path, file) for file in part)
                with self._change:
                    if generation != self._generation:
                        return
                    for file in part:
                        self._index.add(file, self._files.name_of(file.path))
                    loads = self._loads.pop_all()
                for load in loads:
                    self._read(load)
        except OSError as error:
            log.warning("The disk cache cannot be listed: %s", error)
        with self._change:
            if generation != self._generation:
                return
            for path in self._index.files.keys() - found.keys():
                self._index.remove(path, self._files.name_of(path))
            self._scanned_at = self._clock()
            self._change.notify_all()

    def _make_room(self, size: int) -> None:
        """Delete the records that were used least recently, so that `size` more bytes fit."""
        if not self._is_too_full(size):
            return
        with self._change:
            is_old = self._scanned_at is None or self._clock() - self._scanned_at > _SCAN_SECONDS
        if is_old:
            self._scan()
        with self._change:
            limit, needed = self._limit, self._index.total + size
            is_full = needed > limit
            victims = self._index.least_used(needed - int(limit * (1 - _ROOM)) if is_full else 0)
            for path in victims:
                self._index.remove(path, self._files.name_of(path))
            self._num_deleted += len(victims)
        for path in victims:
            self._delete(path)

    def _is_too_full(self, size: int) -> bool:
        with self._change:
            return self._index.total + size > self._limit

    def _delete_all(self) -> None:
        with self._change:
            generation = self._generation
        try:
            with self._operation():
                found = [file.path for file in self._files.scan()]
        except OSError as error:
            log.warning("The disk cache cannot be listed: %s", error)
            found = []
        for path in found:
            if self._files.name_of(path) is not None:
                self._delete(path)
        with self._change:
            if generation == self._generation:
                self._is_clearing = False
            self._change.notify_all()

    def _delete(self, path: Path) -> None:
        try:
            with self._operation():
                self._files.delete(path)
        except OSError as error:
            log.debug("%s cannot be deleted: %s", path, error)

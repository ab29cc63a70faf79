"""DiskThread: performs all access to a tier's records in short operations, so that a load never waits long.

    messages ──▶ taken between two operations ──▶ the most urgent operation ──▶ events

    read a record │ list some files │ note uses │ make room │ write a record │ count the day's bytes

The thread owns all that is here but the two queues, and `began`, which others may read.
"""

from __future__ import annotations

import errno
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum, auto
from functools import partial
from itertools import islice
from pathlib import Path
from queue import SimpleQueue

from mlxserve.disk.index import DiskIndex
from mlxserve.disk.loads import DiskAnswer, DiskLoad
from mlxserve.disk.record import (
    HEADER_SIZE,
    MAX_NAME,
    FoundFile,
    Records,
    Unreachable,
    UnsoundRecord,
)

log = logging.getLogger("mlxserve.disk")

_PASSING = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EINTR, errno.EAGAIN)
_DECAY = 0.95  # weight of earlier reads in the rate, per record
_TOUCHED_FILES = 64  # files per operation
_DELETED_FILES = 64  # files per operation
_MAX_FAULTS, _FAULT_SECONDS = 5, 60.0  # more of them within this time end the thread
_MAX_FOUND = 1 << 20  # records that others have told of
_LISTED_SECONDS = 60.0  # after which files are listed again before one is deleted for room


@dataclass(frozen=True, slots=True)
class Record:
    """A message: write this, unless only more recently used records could make room for it."""

    name: bytes
    payload: bytes
    used: float  # seconds since 1970

    @property
    def size(self) -> int:
        """Size of its file in bytes."""
        return len(self.payload) + HEADER_SIZE


@dataclass(frozen=True, slots=True)
class Touch:
    """A message: these own records were used at these times."""

    used: Mapping[bytes, float]


@dataclass(frozen=True, slots=True)
class Delete:
    """A message: forget these own records, and delete their files."""

    names: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Found:
    """News, not from the tier: others have written this record. Without a name: list all of them again."""

    name: bytes | None = None
    size: int = 0  # bytes


class Order(Enum):
    """A message without content."""

    GIVE_UP = auto()  # nothing waits for the loads any more
    CLEAR = auto()  # forget all own records, and delete their files
    CLOSE = auto()


Message = DiskLoad | Record | Touch | Delete | Order | Found


@dataclass(slots=True)
class DiskUse:
    """The disk's contents, and counters since the start. Sizes in bytes."""

    limit: int
    num_pages: int = 0  # this identity's, as the next three
    num_bytes: int = 0
    num_read: int = 0
    num_written: int = 0
    num_lost: int = 0  # asked for, and missing, cut off, damaged or foreign
    num_deleted: int = 0  # for room, any identity's
    total_bytes: int = 0  # all identities', as of the last look
    bytes_read: int = 0  # payloads that came from files
    bytes_written: int = 0
    written_today: int = 0  # by all processes
    read_rate: float = 0.0  # bytes per second of recent reads; 0 before the first
    state: int = 0  # a DiskState


@dataclass(frozen=True, slots=True)
class DiskNews:
    """An event: an operation's changes, and the state after it."""

    num_messages: int  # messages taken before
    is_idle: bool  # nothing is left to be done of these
    changes: Mapping[bytes, bool]  # own records that came (True) or went
    use: DiskUse
    day: str  # day of the last write
    coldest: float | None  # when the record was used that goes first; None without any
    dropped: tuple[bytes, ...]  # they were to be written, and will not be
    error: OSError | None  # the reason; None where they were used too long ago
    is_out: bool = False  # no record can be reached now


@dataclass(slots=True)
class _Listing:
    """Files that are being listed."""

    files: Iterator[Sequence[FoundFile]]
    unseen: set[Path]  # records of the index that were not listed yet
    is_clearing: bool = False  # own records are deleted


class DiskThread:
    """The worker of one DiskTier; `run` is its thread's target."""

    def __init__(
        self,
        files: Records,
        limit: int,
        clock: Callable[[], float],
        today: Callable[[], str],
        notify: Callable[[], None] | None = None,
    ) -> None:
        """Raises OSError if the folder cannot be created or written to. `notify`: as in `Tier`."""
        files.prepare()
        self.messages: SimpleQueue[Message] = SimpleQueue()
        self.events: SimpleQueue[DiskAnswer | DiskNews | None] = SimpleQueue()  # None at the end
        self.began: float | None = None  # the operation that is under way
        self._notify = notify
        self._files, self._limit, self._clock, self._today = files, limit, clock, today
        self._index = DiskIndex()
        self._num_messages = 0
        self._loads: deque[DiskLoad] = deque()
        self._payloads: list[bytes] = []  # payloads read for the first of these
        self._saves: dict[bytes, Record] = {}  # written in this order
        self._touches: dict[bytes, float] = {}
        self._deletes: dict[bytes, None] = {}
        self._listing: _Listing | None = _Listing(files.batches(), set())
        self._listed_at = 0.0
        self._day = today()
        self._use = DiskUse(limit, written_today=files.written(self._day))
        self._recent_bytes = self._recent_seconds = 0.0  # recent reads
        self._faults: list[float] = []  # when they happened
        # Bytes written today that no other process knows of.
        self._uncounted = 0
        self._has_warned_of_loss = False  # since the last write
        self._is_closed = False
        self._tell()

    def run(self) -> None:
        """Run until the tier is closed, or until faults that are not the disk's repeat."""
        self._files.watch(self)
        try:
            while not self._is_closed:
                try:
                    self._operate()
                except Exception as error:  # noqa: BLE001  (logged, and raised if it stays)
                    self._begin_again(error)
        except Exception:
            words = self._files.wording
            message = "The %s has failed; nothing is kept %s from now on"
            log.exception(message, words.name, words.where)
        finally:
            self._say(None)
            self._files.close()

    def found(self, name: bytes, size: int, /) -> None:
        """Take the news of a record that others have written. For any thread."""
        self.messages.put(Found(name, size))

    def list_again(self) -> None:
        """List all records, of which some may have come or gone unnoticed. For any thread."""
        self.messages.put(Found())

    def _say(self, event: DiskAnswer | DiskNews | None) -> None:
        self.events.put(event)
        if self._notify is not None:
            self._notify()

    def _operate(self) -> None:
        while (operate := self._receive()) is not None:
            operate()
        if self._uncounted:
            self._count_writes()

    def _begin_again(self, fault: Exception) -> None:
        """Drop all pending operations and list the disk again.

        Raises the fault if there were too many.
        """
        now = self._clock()
        self._faults = [at for at in self._faults if now - at < _FAULT_SECONDS] + [now]
        if len(self._faults) > _MAX_FAULTS:
            raise fault
        log.error("A fault in the %s; it begins again", self._files.wording.name, exc_info=fault)
        for load in self._loads:
            self._say(DiskAnswer(load.ticket, ()))
        dropped = tuple(self._saves)
        for queue in (self._loads, self._payloads, self._saves, self._touches):
            queue.clear()
        is_clearing = self._listing is not None and self._listing.is_clearing
        self._listing = _Listing(self._files.batches(), set(self._index.files), is_clearing)
        error = OSError(f"{type(fault).__name__}: {fault}") if dropped else None
        self._tell(dropped=dropped, error=error)

    def _receive(self) -> Callable[[], None] | None:
        """Take all messages, waiting for one if idle, and return the next operation."""
        while not self._is_closed:
            operate = self._next()
            if self.messages.empty():
                if operate is not None:
                    return operate
                self._tell(is_idle=True)
            self._take(self.messages.get())
        return None

    def _take(self, message: Message) -> None:
        if isinstance(message, Found):
            self._take_found(message)
            return
        self._num_messages += 1
        if isinstance(message, DiskLoad):
            self._loads.append(message)
        elif isinstance(message, Record):
            self._saves[message.name] = message
        elif isinstance(message, Touch):
            self._touches |= message.used
        elif isinstance(message, Delete):
            self._deletes |= dict.fromkeys(message.names)
            self._drop_saves(message.names)
        elif message is Order.GIVE_UP:
            self._loads.clear()
            self._payloads.clear()
        elif message is Order.CLEAR:
            self._index = DiskIndex()
            self._saves.clear()
            self._touches.clear()
            self._listing = _Listing(self._files.batches(), set(), is_clearing=True)
        else:
            self._is_closed = True

    def _take_found(self, found: Found) -> None:
        if found.name is None:
            is_clearing = self._listing is not None and self._listing.is_clearing
            self._listing = _Listing(self._files.batches(), set(self._index.files), is_clearing)
            # One that was slow may be fast now: the next load is the measurement.
            self._recent_bytes = self._recent_seconds = self._use.read_rate = 0.0
            return
        # Whoever may tell of records may tell of many that are not there, and of any size.
        is_sound = 0 < len(found.name) <= MAX_NAME and self._index.num_own < _MAX_FOUND
        is_sound = is_sound and self._files.allows(found.size - HEADER_SIZE)
        if is_sound and self._files.path(found.name) not in self._index.files:
            self._add(found.name, found.size, time.time())
            self._tell()

    def _next(self) -> Callable[[], None] | None:
        """The most urgent operation; None if nothing is to be done."""
        if self._files.is_out:
            return self._refuse if self._loads or self._saves or self._touches else None
        if self._loads:
            return partial(self._read, self._loads[0])
        if self._deletes:
            # Before all writes: a record of a deleted one's name was saved later.
            return self._delete_some
        if self._listing is not None:
            return partial(self._list, self._listing)
        if self._touches:
            return self._touch
        if self._is_too_full():
            return self._make_room
        if self._saves:
            return self._write
        return self._count_writes if self._uncounted else None

    @contextmanager
    def _operation(self) -> Iterator[None]:
        self.began = self._clock()
        try:
            yield
        finally:
            self.began = None

    def _tell(
        self, *, is_idle: bool = False, dropped: Iterable[bytes] = (), error: OSError | None = None
    ) -> None:
        index, use = self._index, self._use
        use.num_pages, use.num_bytes, use.total_bytes = index.num_own, index.num_bytes, index.total
        news = (self._num_messages, is_idle, index.pop_changes(), replace(use), self._day)
        coldest = index.coldest()
        used = None if coldest is None else coldest.used
        is_out = self._files.is_out
        self._say(DiskNews(*news, used, tuple(dropped), error, is_out))

    def _refuse(self) -> None:
        """Answer loads with what was read, and drop records, as no record can be reached."""
        for load in self._loads:
            self._say(DiskAnswer(load.ticket, tuple(self._payloads)))
            self._payloads.clear()
        dropped = tuple(self._saves)
        for queue in (self._loads, self._saves, self._touches):
            queue.clear()
        self._tell(dropped=dropped)

    def _read(self, load: DiskLoad) -> None:
        """Read one more record of a load, which is answered after the last one."""
        names = load.names[len(self._payloads) :]
        payload = self._payload(names[0]) if names else None
        if payload is not None:
            self._payloads.append(payload)
        if payload is None or len(names) == 1:
            answer = DiskAnswer(load.ticket, tuple(self._payloads))
            self._use.num_read += len(self._payloads)
            self._tell()
            self._say(answer)
            self._loads.popleft()
            self._payloads.clear()

    def _payload(self, name: bytes) -> bytes | None:
        """Return a record's payload, which may still wait to be written.

        An unreadable record is forgotten, unless the process lacked a resource to read it.
        """
        if name in self._saves or (self._listing is not None and self._listing.is_clearing):
            record = self._saves.get(name)
            return None if record is None else record.payload
        began = self._clock()
        try:
            with self._operation():
                payload = self._files.read(name)
        except (OSError, UnsoundRecord) as error:
            if isinstance(error, OSError) and error.errno in _PASSING:
                log.debug("A page cannot be read now: %s", error)
                return None
            if isinstance(error, Unreachable):
                return None
            if not isinstance(error, FileNotFoundError) and not self._has_warned_of_loss:
                self._has_warned_of_loss = True
                log.warning(
                    "A page %s cannot be used and is computed again: %s",
                    self._files.wording.where,
                    error,
                )
            self._use.num_lost += 1
            self._delete(self._files.path(name))
            return None
        self._use.bytes_read += len(payload)
        self._recent_bytes = _DECAY * self._recent_bytes + len(payload)
        self._recent_seconds = _DECAY * self._recent_seconds + self._clock() - began
        self._use.read_rate = self._recent_bytes / max(self._recent_seconds, 1e-9)
        self._touches[name] = time.time()
        self._add(name, len(payload) + HEADER_SIZE, self._touches[name])
        return payload

    def _add(self, name: bytes, size: int, used: float) -> None:
        """Add an existing record to the index."""
        path = self._files.path(name)
        self._index.add(FoundFile(path, size, used, name))
        if self._listing is not None:
            self._listing.unseen.discard(path)

    def _touch(self) -> None:
        """Store some records' times of last use."""
        names = list(islice(self._touches, _TOUCHED_FILES))
        times = {self._files.path(name): self._touches.pop(name) for name in names}
        known = {path: used for path, used in times.items() if path in self._index.files}
        try:
            with self._operation():
                touched = self._files.touch_all(known)
        except OSError as error:
            log.debug("The use of records cannot be noted: %s", error)
            touched = {}
        for path, is_there in touched.items():
            if is_there:
                self._index.add(replace(self._index.files[path], used=known[path]))
            else:
                self._index.remove(path)
        self._tell()

    def _list(self, listing: _Listing) -> None:
        """List some more files; at the end, forget records that were not listed."""
        try:
            with self._operation():
                part = next(listing.files, None)
        except Unreachable:
            # Listed from the beginning once it can be reached.
            self._listing = replace(listing, files=self._files.batches())
            self._tell()
            return
        except OSError as error:
            log.warning("Records %s cannot be listed: %s", self._files.wording.where, error)
            part = None
            # What was there before probably still is.
            listing.unseen.clear()
        for file in part or ():
            listing.unseen.discard(file.path)
            if listing.is_clearing and file.name is not None:
                self._delete(file.path)
            else:
                self._index.add(file)
        if part is None:
            for path in listing.unseen:
                self._index.remove(path)
            self._listing, self._listed_at = None, self._clock()
        self._tell()

    def _drop_saves(self, names: Iterable[bytes]) -> None:
        """Drop these records from those to be written."""
        dropped = [name for name in names if self._saves.pop(name, None) is not None]
        if dropped:
            self._tell(dropped=dropped)

    def _delete_some(self) -> None:
        for name in list(islice(self._deletes, _DELETED_FILES)):
            self._delete(self._files.path(name))
            if self._files.is_out:
                break  # deleted once it can be reached
            del self._deletes[name]
        self._tell()

    def _is_too_full(self) -> bool:
        """True if the next record does not fit, or the bound is exceeded already."""
        size = next((record.size for record in self._saves.values()), 0)
        return self._index.total + size > self._limit and bool(self._index.files)

    def _make_room(self) -> None:
        """Delete the least recently used record, by an index of the last minute.

        Drops pending writes instead if they were used even less recently.
        """
        victim = self._index.coldest()
        assert victim is not None, "there is nothing to delete"
        record = next(iter(self._saves.values()), None)
        is_colder = record is not None and record.used <= victim.used
        if record is not None and is_colder and self._index.total <= self._limit:
            del self._saves[record.name]
            self._tell(dropped=[record.name])
        elif self._clock() - self._listed_at > _LISTED_SECONDS:
            self._listing = _Listing(self._files.batches(), set(self._index.files))
        else:
            self._use.num_deleted += 1
            self._delete(victim.path)
            self._tell()

    def _write(self) -> None:
        record = next(iter(self._saves.values()))
        try:
            with self._operation():
                self._files.write(record.name, record.payload, record.used)
        except OSError as error:
            is_out = isinstance(error, Unreachable)
            self._tell(dropped=self._saves, error=None if is_out else error)
            self._saves.clear()
            return
        del self._saves[record.name]
        if self._day != self._today():
            self._day, self._use.written_today = self._today(), 0
        self._uncounted += record.size
        self._use.written_today += record.size
        self._use.bytes_written += record.size
        self._use.num_written += 1
        self._has_warned_of_loss = False
        self._add(record.name, record.size, record.used)
        self._tell()

    def _count_writes(self) -> None:
        """Publish the bytes written, for other processes."""
        try:
            with self._operation():
                written = self._files.add_written(self._day, self._uncounted)
            self._use.written_today = max(self._use.written_today, written)
        except OSError as error:
            log.debug("Bytes written today are not counted: %s", error)
        self._uncounted = 0

    def _delete(self, path: Path) -> None:
        """Forget a record, and delete its file."""
        self._index.remove(path)
        try:
            with self._operation():
                self._files.delete(path)
        except OSError as error:
            log.debug("%s cannot be deleted: %s", path, error)

"""Records: what a tier keeps, each under its name, and how it is checked when it is read.

    header     magic, identity, name, length, checksum
    payload    keys and values of a page, or a recurrent state

The identity stands for a model with its page layout and dtype. A record of another one, under another name, cut
off or damaged is never returned.

    DiskFiles     files of a folder            one for each record
    StoreRecords  values of a Redis server     one for each record
"""

from __future__ import annotations

import logging
import struct
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Protocol

log = logging.getLogger("mlxserve.disk")

MAX_NAME = 32  # bytes
IDENTITY_SIZE = 16
_DIGEST_SIZE = 16
_MAGIC = b"mlxpage2"
_HEADER = struct.Struct(f"<8s{IDENTITY_SIZE}sB{MAX_NAME}sQ{_DIGEST_SIZE}s")
HEADER_SIZE = _HEADER.size


class UnsoundRecord(Exception):
    """Raised if what was read is not what was written under this name."""


class Unreachable(OSError):
    """No record can be read or written now, and nothing is known of any of them."""


@dataclass(frozen=True, slots=True)
class FoundFile:
    """A record that exists, of any model."""

    path: Path
    size: int
    used: float  # when it was last read or written, seconds since 1970
    name: bytes | None = None  # None for a record of another model


class Watcher(Protocol):
    """Is told of records that others have written. May be called on any thread."""

    def found(self, name: bytes, size: int, /) -> None:
        """A record of `size` bytes with its header exists."""

    def list_again(self) -> None:
        """Records may have come or gone without news of them."""


@dataclass(frozen=True, slots=True)
class Wording:
    """Says how warnings name a tier, its place, and the options that bound it."""

    name: str = "disk cache"
    thread: str = "mlxserve-disk"
    subject: str = "The disk"
    where: str = "on disk"
    size_option: str = "disk_cache_size"
    writes_option: str = "disk_cache_daily_writes"


ON_DISK = Wording()


class Records(ABC):
    """Every access to the records of one identity. Methods raise OSError, and Unreachable."""

    wording = ON_DISK

    def __init__(self, identity: bytes, payload_sizes: Collection[int] | None = None) -> None:
        """payload_sizes: allowed sizes of payloads in bytes; None allows any."""
        self._identity = identity
        self._sizes = payload_sizes

    @property
    def is_out(self) -> bool:
        """True while no record can be reached. The records themselves find out when they can be again."""
        return False

    def header(self, name: bytes, payload: bytes) -> bytes:
        """Return a record's header, which ends with a checksum of header and payload."""
        assert len(name) <= MAX_NAME, "a name of more than 32 bytes"
        fields = (_MAGIC, self._identity, len(name), name, len(payload))
        start = _HEADER.pack(*fields, b"")[:-_DIGEST_SIZE]
        checksum = blake2b(start, digest_size=_DIGEST_SIZE)
        checksum.update(payload)
        return start + checksum.digest()

    def allows(self, size: int) -> bool:
        """True if a record may have a payload of `size` bytes."""
        return size >= 0 and (self._sizes is None or size in self._sizes)

    def touch_all(self, used: Mapping[Path, float]) -> dict[Path, bool]:
        """Set the times of last use. Return True for each that was set, and False for one that is gone."""
        done: dict[Path, bool] = {}
        for path, at in used.items():
            try:
                self.touch(path, at)
                done[path] = True
            except FileNotFoundError:
                done[path] = False
            except OSError as error:
                log.debug("The use of %s cannot be noted: %s", path, error)
        return done

    def watch(self, watcher: Watcher) -> None:  # noqa: B027  (files are listed instead)
        """Begin to tell of records that others write."""

    def close(self) -> None:  # noqa: B027
        """Release what `watch` and the others have opened. Idempotent."""

    @abstractmethod
    def prepare(self) -> None:
        """Make the place for the records usable."""

    @abstractmethod
    def path(self, name: bytes) -> Path:
        """Return the place of a record."""

    @abstractmethod
    def write(self, name: bytes, payload: bytes, used: float | None = None) -> None:
        """Write a record atomically. `used`: time of its last use; None for now."""

    @abstractmethod
    def read(self, name: bytes) -> bytes:
        """Return a record's payload. Raises UnsoundRecord, FileNotFoundError."""

    @abstractmethod
    def touch(self, path: Path, used: float) -> None:
        """Set a record's time of last use."""

    @abstractmethod
    def delete(self, path: Path) -> None:
        """Delete a record; no error if it is not there."""

    @abstractmethod
    def batches(self) -> Iterator[Sequence[FoundFile]]:
        """Yield the records that exist, a few at a time; a batch may be empty."""

    @abstractmethod
    def written(self, day: str) -> int:
        """Return the bytes written on this day, by all processes, as far as is known."""

    @abstractmethod
    def add_written(self, day: str, num_bytes: int) -> int:
        """Add `num_bytes` to this day's count, and return it."""

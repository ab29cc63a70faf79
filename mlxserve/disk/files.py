"""DiskFiles: the files of the disk cache, one for each record, and nothing of what they are for.

    base/                      0700
        writes.json            bytes written today, by every process
        <identity>/model       its name, for people
        <identity>/            of a model and its page layout
            <2 hex>/<name>.page    0600

A file is written under another name and renamed, so that it is whole or not there. Other processes
may use the same folder: a file that has vanished is no error.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import re
import struct
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

log = logging.getLogger("mlxserve.disk")

MAX_NAME = 32  # bytes
IDENTITY_SIZE = 16
_DIGEST_SIZE = 16
_MAGIC = b"mlxpage2"
_HEADER = struct.Struct(f"<8s{IDENTITY_SIZE}sB{MAX_NAME}sQ{_DIGEST_SIZE}s")
HEADER_SIZE = _HEADER.size
_SUFFIX, _UNFINISHED, _MODEL = ".page", ".new", "model"
_LONG, _SHORT = re.compile(f"[0-9a-f]{{{2 * IDENTITY_SIZE}}}"), re.compile("[0-9a-f]{2}")
_LEFT_SECONDS = 3600.0  # after which an unfinished file belongs to a process that has died


class UnsoundRecord(Exception):
    """A file does not hold what was written under its name."""


@dataclass(frozen=True, slots=True)
class FoundFile:
    """A record of any model."""

    path: Path
    size: int
    used: float  # when it was last read or written, seconds since 1970
    name: bytes | None = None  # None for a record of another model


class DiskFiles:
    """Every access to the disk. Methods raise OSError."""

    def __init__(self, base: Path, identity: bytes, model: str = "") -> None:
        """`model`: its name, for people."""
        self.base = base
        self._model = model
        self.folder = base / identity.hex()
        self._identity = identity
        self._numbers = itertools.count()

    def prepare(self) -> None:
        """Make the folder, and see whether it can be written to."""
        for folder in (self.base, self.folder):  # parents would get the usual mode
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        probe = self._unfinished(self.folder)
        self._write(probe, self._model.encode())
        os.replace(probe, self.folder / _MODEL)

    def path(self, name: bytes) -> Path:
        text = name.hex()
        return self.folder / text[:2] / (text + _SUFFIX)

    def write(self, name: bytes, payload: bytes, used: float | None = None) -> None:
        """Write a record, whole or not at all. `used`: when it was used last; None for now."""
        path = self.path(name)
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        unfinished = self._unfinished(path.parent)
        try:
            self._write(unfinished, self.header(name, payload), payload)
            os.utime(unfinished, None if used is None else (used, used))
            os.replace(unfinished, path)
        except OSError:
            with contextlib.suppress(OSError):
                unfinished.unlink(missing_ok=True)
            raise

    def read(self, name: bytes) -> bytes:
        """The payload, exactly as it was written. Raises UnsoundRecord, FileNotFoundError."""
        path = self.path(name)
        record = path.read_bytes()
        payload = record[HEADER_SIZE:]
        if record[:HEADER_SIZE] != self.header(name, payload):
            raise UnsoundRecord(f"{path} is cut off, damaged or foreign")
        return payload

    def touch(self, path: Path, used: float) -> None:
        """Note when a record was used last, for the next process as well."""
        os.utime(path, (used, used))

    def header(self, name: bytes, payload: bytes) -> bytes:
        """What precedes the payload in its file; its end is a checksum of all of it."""
        assert len(name) <= MAX_NAME, "a name of more than 32 bytes"
        fields = (_MAGIC, self._identity, len(name), name, len(payload))
        start = _HEADER.pack(*fields, b"")[:-_DIGEST_SIZE]
        checksum = blake2b(start, digest_size=_DIGEST_SIZE)
        checksum.update(payload)
        return start + checksum.digest()

    def delete(self, path: Path) -> None:
        """Delete a file; no error if it is not there."""
        path.unlink(missing_ok=True)

    def scan(self) -> Iterator[FoundFile]:
        """`scan` of the folder, with the names of own records."""
        for file in scan(self.base):
            yield FoundFile(file.path, file.size, file.used, self._name_of(file.path))

    def _name_of(self, path: Path) -> bytes | None:
        if path.parent.parent != self.folder:
            return None
        try:
            return bytes.fromhex(path.name.removesuffix(_SUFFIX))
        except ValueError:
            return None

    def written(self, day: str) -> int:
        """Bytes written on this day, by every process; 0 if nothing sound says so."""
        try:
            found = json.loads((self.base / "writes.json").read_bytes())
            return max(0, int(found["bytes"])) if found["day"] == day else 0
        except (OSError, ValueError, KeyError, TypeError):
            return 0

    def add_written(self, day: str, num_bytes: int) -> int:
        """Count `num_bytes` more; the new number of this day's."""
        total = self.written(day) + num_bytes
        unfinished = self._unfinished(self.base)
        self._write(unfinished, json.dumps({"day": day, "bytes": total}).encode())
        os.replace(unfinished, self.base / "writes.json")
        return total

    def _unfinished(self, folder: Path) -> Path:
        return folder / f".{os.getpid()}-{next(self._numbers)}{_UNFINISHED}"

    @staticmethod
    def _write(path: Path, *pieces: bytes) -> None:
        with open(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), "wb") as file:
            for piece in pieces:
                file.write(piece)


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    """What is in a folder; nothing, with a warning, of one that cannot be listed."""
    try:
        return list(os.scandir(folder))
    except FileNotFoundError:
        return []
    except OSError as error:
        log.warning("A part of the disk cache cannot be listed: %s", error)
        return []


def _folders(entries: Iterable[os.DirEntry[str]], name: re.Pattern[str]) -> list[Path]:
    """Those named like subfolders of a disk cache; all others are ignored."""
    return [
        Path(one.path)
        for one in entries
        if name.fullmatch(one.name) and one.is_dir(follow_symlinks=False)
    ]


def scan(base: Path) -> Iterator[FoundFile]:
    """The records of all models; unfinished files of dead processes are removed.

    Raises OSError if `base` is there and cannot be listed.
    """
    models = _folders(os.scandir(base), _LONG) if base.exists() else []
    for folder in (one for model in models for one in _folders(_entries(model), _SHORT)):
        entries = _entries(folder)
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):
                state = entry.stat(follow_symlinks=False)
                if entry.name.endswith(_SUFFIX):
                    yield FoundFile(Path(entry.path), state.st_size, state.st_mtime)
                elif (
                    entry.name.endswith(_UNFINISHED)
                    and state.st_mtime < time.time() - _LEFT_SECONDS
                ):
                    os.unlink(entry.path)


def model_of(file: FoundFile) -> str:
    """The name that its model had, or else the name of the folder."""
    folder = file.path.parent.parent
    try:
        return (folder / _MODEL).read_text("utf-8") or folder.name
    except (OSError, ValueError):
        return folder.name

"""DiskFiles: the files of the disk cache, one for each record.

    base/                      0700
        writes.json            bytes written today, by every process
        <identity>/model       its name, for people
        <identity>/            of a model and its page layout
            <2 hex>/<name>.page    0600

A file is written under another name and renamed, so that it is whole or not there. Other processes
may use the same folder: a file that has vanished is no error. Nobody else may write there, and
links are not followed below `base`: what was put in the way of a record is renamed, and nothing of
it read.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import re
import stat
import time
from collections.abc import Collection, Iterable, Iterator
from itertools import islice
from pathlib import Path

from mlxserve.disk.record import HEADER_SIZE, IDENTITY_SIZE, FoundFile, Records, UnsoundRecord
from mlxserve.system.files import make_own_folder, open_regular, read_file, read_own_json, write_new

log = logging.getLogger("mlxserve.disk")

_SUFFIX, _UNFINISHED, _MODEL = ".page", ".new", "model"
_LONG, _SHORT = re.compile(f"[0-9a-f]{{{2 * IDENTITY_SIZE}}}"), re.compile("[0-9a-f]{2}")
_COUNT_BYTES = 1 << 12  # most of writes.json
_MODEL_BYTES = 1 << 12  # most of a model's name
_BATCH = 256  # files
_LEFT_SECONDS = 3600.0  # after which an unfinished file belongs to a process that has died


class DiskFiles(Records):
    """Every access to the disk. Methods raise OSError."""

    def __init__(
        self,
        base: Path,
        identity: bytes,
        model: str = "",
        payload_sizes: Collection[int] | None = None,
    ) -> None:
        """model: its name, for people.

        payload_sizes: allowed sizes of records in bytes; None allows any
        """
        super().__init__(identity, payload_sizes)
        self.base = base
        self._model = model
        self.folder = base / identity.hex()
        self._unlisted: set[Path] = set()  # subfolders that the last scan could not list
        self._numbers = itertools.count()

    def prepare(self) -> None:
        """Create the folder, and check that it is usable and writable by this user alone."""
        self._make()
        _check_owner(self.base)
        os.listdir(self.base)
        self._put(self.folder / _MODEL, self._model.encode())

    def path(self, name: bytes) -> Path:
        text = name.hex()
        return self.folder / text[:2] / (text + _SUFFIX)

    def write(self, name: bytes, payload: bytes, used: float | None = None) -> None:
        """Write a record atomically. `used`: time of its last use; None for now."""
        path = self.path(name)
        self._make()
        self._take(path.parent)
        self._put(path, self.header(name, payload), payload, used=used)

    def read(self, name: bytes) -> bytes:
        """Return a record's payload. Raises UnsoundRecord, FileNotFoundError."""
        path = self.path(name)
        with open_regular(path, follows=False) as file:
            size = os.fstat(file.fileno()).st_size - HEADER_SIZE
            if not self.allows(size):
                raise UnsoundRecord(f"{path} has {size + HEADER_SIZE} bytes, which no page has")
            header, payload = file.read(HEADER_SIZE), file.read(size)
        if header != self.header(name, payload):
            raise UnsoundRecord(f"{path} is cut off, damaged or foreign")
        return payload

    def touch(self, path: Path, used: float) -> None:
        """Set a record's time of last use, also for the next process."""
        os.utime(path, (used, used))

    def delete(self, path: Path) -> None:
        """Delete a file; no error if it is not there."""
        path.unlink(missing_ok=True)

    def batches(self) -> Iterator[list[FoundFile]]:
        files = self.scan()
        while batch := list(islice(files, _BATCH)):
            yield batch

    def scan(self) -> Iterator[FoundFile]:
        """Like `scan` of the folder, with the names of own records."""
        self._unlisted.clear()
        for file in scan(self.base, self._unlisted):
            yield FoundFile(file.path, file.size, file.used, self._name_of(file.path))

    def _name_of(self, path: Path) -> bytes | None:
        if path.parent.parent != self.folder:
            return None
        try:
            return bytes.fromhex(path.name.removesuffix(_SUFFIX))
        except ValueError:
            return None

    def written(self, day: str) -> int:
        """Bytes written on this day by all processes; 0 if the count is missing or damaged."""
        try:
            count = read_own_json(self.base / "writes.json", _COUNT_BYTES)
            return max(0, int(count["bytes"])) if count["day"] == day else 0
        except (OSError, ValueError, LookupError, TypeError):
            return 0

    def add_written(self, day: str, num_bytes: int) -> int:
        """Add `num_bytes` to this day's count, and return it."""
        total = self.written(day) + num_bytes
        self._put(self.base / "writes.json", json.dumps({"day": day, "bytes": total}).encode())
        return total

    def _make(self) -> None:
        make_own_folder(self.base)
        self._take(self.folder)

    def _take(self, folder: Path) -> None:
        """Create a subfolder, or make an existing one usable."""
        try:
            folder.mkdir(mode=0o700)
        except FileExistsError:
            if folder in self._unlisted or not _is_own_folder(folder):
                self._set_aside(folder)
                self._unlisted.discard(folder)
                folder.mkdir(mode=0o700)

    def _put(self, path: Path, *pieces: bytes, used: float | None = None) -> None:
        """Write a file atomically."""
        unfinished = path.with_name(f".{os.getpid()}-{next(self._numbers)}{_UNFINISHED}")
        try:
            write_new(unfinished, *pieces)
            os.utime(unfinished, None if used is None else (used, used))
            try:
                os.replace(unfinished, path)
            except IsADirectoryError:
                self._set_aside(path)
                os.replace(unfinished, path)
        except OSError:
            with contextlib.suppress(OSError):
                unfinished.unlink(missing_ok=True)
            raise

    def _set_aside(self, path: Path) -> None:
        """Rename whatever is in the way of one of our files or folders."""
        aside = path.with_name(f"{path.name}.{os.getpid()}-{next(self._numbers)}.unused")
        os.rename(path, aside)
        log.warning(
            "%s was not made by mlxserve or cannot be used, and is now %s. Delete it if you do not "
            "need it; the disk cache does not count it.",
            path,
            aside.name,
        )


def _check_owner(base: Path) -> None:
    """Raises OSError for a folder that other users can write to: its pages would be trusted."""
    state = base.stat()
    if state.st_uid not in (os.geteuid(), 0):
        raise PermissionError(f"{base} belongs to another user")
    if state.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(f"other users may write to it (run `chmod go-w {base}`)")


def _is_own_folder(folder: Path) -> bool:
    """True if this user owns the folder and it is no link; sets the mode of a new one."""
    state = folder.lstat()
    if not stat.S_ISDIR(state.st_mode) or state.st_uid != os.geteuid():
        return False
    if stat.S_IMODE(state.st_mode) != 0o700:
        folder.chmod(0o700)
    return True


def _entries(folder: Path, unlisted: set[Path]) -> list[os.DirEntry[str]]:
    """Entries of a subfolder; empty, with a warning, if it cannot be listed."""
    try:
        if not os.access(folder, os.R_OK | os.X_OK):
            folder.chmod(0o700)
        return list(os.scandir(folder))
    except FileNotFoundError:
        return []
    except OSError as error:
        log.warning("A part of the disk cache cannot be listed: %s", error)
        unlisted.add(folder)
        return []


def _folders(entries: Iterable[os.DirEntry[str]], name: re.Pattern[str]) -> list[Path]:
    """Entries named like subfolders of a disk cache; all others are ignored."""
    return [
        Path(entry.path)
        for entry in entries
        if name.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
    ]


def scan(base: Path, unlisted: set[Path] | None = None) -> Iterator[FoundFile]:
    """Yield the records of all models, removing unfinished files of dead processes.

    unlisted: receives the subfolders that cannot be listed, whose records are not found

    Raises OSError if `base` exists and cannot be listed.
    """
    unlisted = set() if unlisted is None else unlisted
    for model in model_folders(base):
        for folder in _folders(_entries(model, unlisted), _SHORT):
            for entry in _entries(folder, unlisted):
                if (file := _found(entry)) is not None:
                    yield file


def _found(entry: os.DirEntry[str]) -> FoundFile | None:
    """Return the record of a subfolder's entry; None for anything else."""
    try:
        state = entry.stat(follow_symlinks=False)
        if not stat.S_ISREG(state.st_mode):
            return None
        if entry.name.endswith(_SUFFIX):
            return FoundFile(Path(entry.path), state.st_size, state.st_mtime)
        if entry.name.endswith(_UNFINISHED) and state.st_mtime < time.time() - _LEFT_SECONDS:
            os.unlink(entry.path)
    except FileNotFoundError:
        pass
    except OSError as error:
        log.debug("%s is not a page that can be used: %s", entry.path, error)
    return None


def model_folders(base: Path) -> list[Path]:
    """Folders that `scan` visits. Raises OSError as it does."""
    return list(_folders(os.scandir(base), _LONG)) if base.exists() else []


def model_of(folder: Path) -> str:
    """Name of these records' model, else the name of their folder."""
    try:
        return read_file(folder / _MODEL, _MODEL_BYTES).decode() or folder.name
    except (OSError, ValueError):
        return folder.name

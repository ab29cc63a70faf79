"""Reads files of any kind safely, and writes files of our own.

A FIFO has `open` wait for a writer that never comes, a device may have no end, and a file may be
larger than the memory or nested deeper than the stack. So a file is read only if it is a regular
one (links are followed first) and has no more bytes than its kind can need; everything else is a
ValueError or an OSError.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO, Never

_MAX_INT_DIGITS, _MAX_FLOAT = 18, 1e18  # bounds of numbers in files of our own
_TEXTS = (".json", ".jinja", ".txt", ".model", ".tiktoken")
# Bytes; the largest tokenizers have a seventh of that.
MAX_TEXT = 256 << 20
_TEMPLATES = "additional_chat_templates"  # the one subfolder that loaders look into
_numbers = itertools.count()
# In a folder that mlxserve made, and may delete with all that is in it.
_MARKER = ".made-by-mlxserve"
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)  # errors of a full disk


def open_regular(file: Path, *, follows: bool = True) -> BinaryIO:
    """Open a regular file to read it, without waiting. Raises OSError, also for any other kind.

    follows: links
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
    descriptor = os.open(file, flags if follows else flags | os.O_NOFOLLOW)
    try:
        _check_kind(file, os.fstat(descriptor).st_mode)
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_opened(opened: BinaryIO, limit: int) -> bytes:
    """Read a file of `open_regular`. Raises OSError, and ValueError beyond `most` bytes."""
    size = os.fstat(opened.fileno()).st_size
    if size > limit:
        raise ValueError(f"it has more than {limit} bytes")
    return opened.read(size)


def read_file(file: Path, limit: int) -> bytes:
    """Read a regular file. Raises OSError, and ValueError for more than `most` bytes."""
    with open_regular(file) as opened:
        return read_opened(opened, limit)


def read_json(file: Path, limit: int) -> Any:
    """Parse a JSON file of any program. Raises OSError and ValueError."""
    return _parsed(read_file(file, limit))


def read_own_json(file: Path, limit: int) -> dict[str, Any]:
    """Parse a file with `own_json`. Raises OSError and ValueError."""
    return own_json(read_file(file, limit))


def own_json(content: bytes) -> dict[str, Any]:
    """Parse the object in a JSON file that mlxserve wrote, whose integers fit into 64 bits.

    Raises ValueError.
    """
    value = _parsed(content, parse_int=_int, parse_float=_float, parse_constant=_refuse)
    if not isinstance(value, dict):
        raise ValueError("it does not contain an object")
    return value


def make_own_folder(folder: Path) -> None:
    """Make a folder and those above it that are missing, for this user alone. Raises OSError."""
    missing = (parent for parent in (folder, *folder.parents) if not parent.exists())
    for parent in reversed(tuple(missing)):
        parent.mkdir(mode=0o700, exist_ok=True)
    # Raises where it is no folder.
    folder.mkdir(exist_ok=True)


def make_marked_folder(folder: Path) -> None:
    """Make a folder for files of ours, for this user alone, with a mark that we made it.

    One that exists gets no mark, unless it is empty. Raises OSError.
    """
    make_own_folder(folder.parent)
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    if not any(folder.iterdir()):
        # Of two programs that start at the same time, the other one may mark it first.
        with contextlib.suppress(FileExistsError):
            write_new(folder / _MARKER)


def is_marked(folder: Path) -> bool:
    """True if `make_marked_folder` made this folder, which is no link to one."""
    try:
        kinds = (
            stat.S_ISDIR(folder.lstat().st_mode),
            stat.S_ISREG((folder / _MARKER).lstat().st_mode),
        )
    except OSError:
        return False
    return all(kinds)


def remove_if_empty(folder: Path) -> None:
    """Remove a folder in which nothing is left but our mark. Raises OSError if there is more."""
    if is_marked(folder) and [entry.name for entry in folder.iterdir()] == [_MARKER]:
        (folder / _MARKER).unlink()
    folder.rmdir()


def write_new(file: Path, *pieces: bytes) -> None:
    """Write a file that only its owner can read, replacing a file or link of its name.

    Never through a link, and never into a file that another program made. Raises OSError.
    """
    file.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(os.open(file, flags, 0o600), "wb") as opened:
        for piece in pieces:
            opened.write(piece)


def replace_file(file: Path, content: bytes, *, is_synced: bool = False) -> None:
    """Write a file atomically: a reader sees the old or the new one. Raises OSError.

    On a full disk, text that is no longer than the old one is written over it, so that an entry can be
    removed; a crash at that moment leaves a damaged file.

    is_synced: wait until the disk has it, so that it survives a loss of power
    """
    unfinished = file.with_name(f".{os.getpid()}-{next(_numbers)}-{file.name}.new")
    try:
        write_new(unfinished, content)
        if is_synced:
            with open_regular(unfinished) as opened:
                os.fsync(opened.fileno())
        os.replace(unfinished, file)
    except OSError as error:
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)
        if error.errno not in NO_ROOM or not _overwrite(file, content, is_synced=is_synced):
            raise


def _overwrite(file: Path, content: bytes, *, is_synced: bool) -> bool:
    """Write over a file of ours that is at least as long. False if it is none. Raises OSError."""
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        state = os.fstat(descriptor)
        is_own = stat.S_ISREG(state.st_mode) and state.st_nlink == 1
        if not is_own or state.st_uid != os.geteuid() or state.st_size < len(content):
            return False
        # In one call, and spaces after it: a reader in between sees one or the other.
        os.pwrite(descriptor, content.ljust(state.st_size), 0)
        os.ftruncate(descriptor, len(content))
        if is_synced:
            os.fsync(descriptor)
        return True
    finally:
        os.close(descriptor)


def check_model_files(folder: Path) -> None:
    """Raises ValueError for files that would block the loader or fill the memory.

    That is a file that is not regular, or a text (configuration, vocabulary, template) of more than
    MAX_TEXT.
    """
    for file in (*_entries(folder), *_entries(folder / _TEMPLATES)):
        try:
            state = file.stat()
        except OSError:
            # A link to nothing, which no loader can open.
            continue
        if stat.S_ISDIR(state.st_mode):
            continue
        if not stat.S_ISREG(state.st_mode):
            raise ValueError(f"{file.name} is not a regular file")
        if file.suffix in _TEXTS and state.st_size > MAX_TEXT:
            raise ValueError(f"{file.name} has {state.st_size} bytes; at most {MAX_TEXT} are read")


def _parsed(content: bytes, **parsers: Any) -> Any:
    try:
        return json.loads(content.decode(), **parsers)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _entries(folder: Path) -> Iterable[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else ()


def _check_kind(file: Path, mode: int) -> None:
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(file))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "It is not a regular file", str(file))


def _int(text: str) -> int:
    if len(text.lstrip("-")) > _MAX_INT_DIGITS:
        raise ValueError("a number in it is too large")
    return int(text)


def _float(text: str) -> float:
    value = float(text)
    if not abs(value) < _MAX_FLOAT:
        raise ValueError("a number in it is too large")
    return value


def _refuse(text: str) -> Never:
    raise ValueError(f"it contains {text}, which is not a number")

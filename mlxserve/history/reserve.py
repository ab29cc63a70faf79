"""Reserve: room on the disk that is kept for opening and deleting chats once it is full.

SQLite writes what it deletes into its log first, so on a full disk nothing could be deleted to make
room.
"""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import suppress
from pathlib import Path

from mlxserve.history.chat_file import DiskFull, not_saved
from mlxserve.system.files import NO_ROOM, write_new

# Bytes. A deletion without the index writes 64 KiB and a page for each 4 MiB; what the log holds on a
# disk that has just become full must fit into the file before the log can be emptied. With less than
# `_MIN_SIZE`, nothing is added.
SIZE = 4 << 20
_MIN_SIZE = 256 << 10
# Free bytes of a disk that the search index leaves when it is built again.
SCARCE = 128 << 20
_FILE = "chat.sqlite-reserve"


class Reserve:
    """A file of `SIZE` bytes at most, which all chat files of a folder share."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / _FILE

    def keep(self, db: sqlite3.Connection) -> None:
        """Make the file, of half the free bytes at most. Raises DiskFull where these are too few."""
        with suppress(OSError):  # a disk that does not tell
            size, goal = self._size(), min(SIZE, self.free() // 2)
            if size >= _MIN_SIZE and 2 * size > goal:
                return
            self.release()
            empty_log(db)
            goal = min(SIZE, self.free() // 2)
            if goal < _MIN_SIZE:
                raise DiskFull(not_saved("the disk is full"))
            self._make(goal)

    def _size(self) -> int:
        """Bytes of the file; 0 without one."""
        try:
            return self._file.stat().st_size
        except FileNotFoundError:
            return 0

    def free(self) -> int:
        """Free bytes of the disk. Raises OSError."""
        return shutil.disk_usage(self._file.parent).free

    def release(self) -> None:
        """Give the room back to the disk."""
        with suppress(OSError):
            self._file.unlink(missing_ok=True)

    def _make(self, size: int) -> None:
        try:
            write_new(self._file, bytes(size))
        except OSError as error:
            if error.errno in NO_ROOM:
                self.release()
                raise DiskFull(not_saved("the disk is full")) from error
            raise


def empty_log(db: sqlite3.Connection) -> None:
    """Move the log into the file. While other terminals read, or without room, it stays."""
    with suppress(sqlite3.Error):
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

"""Reserve: room on the disk that is kept for deleting chats once it is full.

SQLite writes what it deletes into its log first, so on a full disk nothing could be deleted to make
room.
"""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import suppress
from pathlib import Path

from mlxserve.system.files import write_new

# Bytes: what SQLite's log holds on a disk that has just become full, which must fit into the file before
# the log can be emptied, and what deleting a message then adds to it.
SIZE = 4 << 20
SCARCE = 128 << 20  # free bytes of a disk, below which the room is taken


class Reserve:
    """A file of `SIZE` bytes beside a chat file."""

    def __init__(self, chats: Path) -> None:
        self._file = chats.with_name(f"{chats.name}-reserve")

    def fill(self) -> None:
        """Make the file if the disk will soon be full, and has room for it now."""
        with suppress(OSError):
            free = shutil.disk_usage(self._file.parent).free
            if SIZE < free < SCARCE and not self._file.exists():
                write_new(self._file, bytes(SIZE))

    def release(self) -> None:
        """Give the room back to the disk."""
        with suppress(OSError):
            self._file.unlink(missing_ok=True)


def empty_log(db: sqlite3.Connection) -> None:
    """Move the log into the file. While other terminals read, or without room, it stays."""
    with suppress(sqlite3.Error):
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

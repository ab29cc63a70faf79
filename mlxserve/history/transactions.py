"""Transactions on a file of chats: they wait for other writers, and delete on a full disk as well."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from mlxserve.history import search_index
from mlxserve.history.chat_file import DiskFull, StoreError, is_full, not_saved
from mlxserve.history.reserve import Reserve, empty_log

T = TypeVar("T")

DELETED = "This chat was deleted. Start a new one with Ctrl+N."


class Transactions:
    """Runs the transactions of a `Store`, which has the connection and the reserve."""

    _db: sqlite3.Connection
    _reserve: Reserve | None

    def _change(self, change: Callable[[sqlite3.Connection], T], *, frees_space: bool = False) -> T:
        """Run one transaction; on a full disk again, which frees the search index's space first."""
        try:
            with self._write() as db:
                return change(db)
        except DiskFull:
            if frees_space and self._reserve is not None:
                self._reserve.release()
        with search_index.small_deletes(self._db), self._write() as db:
            search_index.drop(db)
            result = change(db)
        empty_log(self._db)
        return result

    @contextmanager
    def _write(self) -> Iterator[sqlite3.Connection]:
        """Run one transaction. Takes the write lock at once, so that it is never upgraded later."""
        try:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
            except BaseException:
                if self._db.in_transaction:  # a full disk ends it
                    self._db.execute("ROLLBACK")
                raise
            self._db.execute("COMMIT")
        except sqlite3.IntegrityError as error:
            raise StoreError(DELETED) from error
        except sqlite3.Error as error:
            if not is_full(error):
                raise StoreError(not_saved(error)) from error
            # What the failed transaction wrote to the log is room for others.
            empty_log(self._db)
            raise DiskFull(not_saved(error)) from error

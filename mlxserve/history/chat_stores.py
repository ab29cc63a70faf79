"""ChatStores: the server's chats, in the files and the format of the terminal's.

    chat.sqlite            what the terminal writes too: chats without an API key
    chats/KEY.sqlite       the chats of one API key, bounded in size

The files are opened on first use. One that is in use is opened once more for another thread: no
work on chats waits for other work, except that SQLite writes to a file in turns.
"""

from __future__ import annotations

import sqlite3
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from mlxserve.history.chat_file import StoreError
from mlxserve.history.store import Store

T = TypeVar("T")

MAX_KEY_BYTES = 256 << 20  # size of one API key's file
_MAX_IDLE = 16  # open files that are not in use


class ChatStores:
    """The chats of all users, by the id of the API key that owns them; "" without keys.

    Thread-safe.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()  # held for the list alone
        self._idle: list[tuple[str, Store]] = []  # the one used last is last
        self._num_running: Counter[str] = Counter()  # calls of `run`, by owner
        self._is_closed = False

    def run(self, owner: str, work: Callable[[Store], T]) -> T:
        """Call `work` with the owner's chats. Raises StoreError, and what `work` raises."""
        with self._lock:
            self._num_running[owner] += 1
        try:
            with self._use(owner) as store:
                return work(store)
        except sqlite3.Error as error:
            raise StoreError(
                f"The chats in {self._path(owner)} cannot be read: {error}."
            ) from error
        finally:
            with self._lock:
                self._num_running[owner] -= 1

    def is_running(self, owner: str) -> bool:
        """True while work on the owner's chats runs."""
        return self._num_running[owner] > 0

    def size(self, owner: str) -> int:
        """Bytes of the owner's file; 0 if there is none."""
        try:
            return self._path(owner).stat().st_size
        except OSError:
            return 0

    def version(self, owner: str) -> tuple[tuple[int, int], ...]:
        """Return what differs once any program has written into the owner's file."""
        path = self._path(owner)
        return tuple(_size_and_time(file) for file in (path, path.with_name(f"{path.name}-wal")))

    def close(self) -> None:
        """Close the files, and those in use once they are not."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
        for _, store in idle:
            store.close()

    @contextmanager
    def _use(self, owner: str) -> Iterator[Store]:
        store = self._taken(owner) or self._opened(owner)
        try:
            yield store
        finally:
            self._give_back(owner, store)

    def _taken(self, owner: str) -> Store | None:
        with self._lock:
            for at, (each, store) in enumerate(self._idle):
                if each == owner:
                    del self._idle[at]
                    return store
        return None

    def _opened(self, owner: str) -> Store:
        return Store.open(self._path(owner), MAX_KEY_BYTES if owner else None)

    def _give_back(self, owner: str, store: Store) -> None:
        with self._lock:
            self._idle.append((owner, store))
            num_kept = 0 if self._is_closed else _MAX_IDLE
            surplus = self._idle[: len(self._idle) - num_kept]
            self._idle = self._idle[len(surplus) :]
        for _, each in surplus:
            each.close()

    def _path(self, owner: str) -> Path:
        return self._folder / "chats" / f"{owner}.sqlite" if owner else self._folder / "chat.sqlite"


def _size_and_time(file: Path) -> tuple[int, int]:
    try:
        found = file.stat()
    except OSError:
        return 0, 0
    return found.st_size, found.st_mtime_ns

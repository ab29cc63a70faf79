"""ChatStores: the server's chats, in the files and the format of the terminal's.

    chat.sqlite            what the terminal writes too: chats without an API key
    chats/KEY.sqlite       the chats of one API key, bounded in size

The files are opened on first use, and used from one thread.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from mlxserve.history.chat_file import StoreError
from mlxserve.history.store import Store

T = TypeVar("T")

MAX_KEY_BYTES = 256 << 20  # size of one API key's file
_MAX_OPEN = 16  # files


class ChatStores:
    """The chats of all users, by the id of the API key that owns them; "" without keys."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: dict[str, Store] = {}  # the one used last is last
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="chats")

    async def call(self, owner: str, work: Callable[[Store], T]) -> T:
        """Call `work` with the owner's chats. Raises StoreError, and what `work` raises."""
        return await asyncio.get_running_loop().run_in_executor(
            self._thread, self._work, owner, work
        )

    async def close(self) -> None:
        """Finish pending writes, close the files and end the thread."""
        await asyncio.get_running_loop().run_in_executor(self._thread, self._close_all)
        self._thread.shutdown(wait=False)

    def _work(self, owner: str, work: Callable[[Store], T]) -> T:
        try:
            return work(self._store(owner))
        except sqlite3.Error as error:
            raise StoreError(
                f"The chats in {self._path(owner)} cannot be read: {error}."
            ) from error

    def _store(self, owner: str) -> Store:
        store = self._open.pop(owner, None)
        if store is None:
            while len(self._open) >= _MAX_OPEN:
                self._open.pop(next(iter(self._open))).close()
            store = Store.open(self._path(owner))
            if owner:
                store.limit(MAX_KEY_BYTES)
        self._open[owner] = store
        return store

    def _path(self, owner: str) -> Path:
        return self._folder / "chats" / f"{owner}.sqlite" if owner else self._folder / "chat.sqlite"

    def _close_all(self) -> None:
        while self._open:
            self._open.popitem()[1].close()

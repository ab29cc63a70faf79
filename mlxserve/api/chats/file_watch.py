"""FileWatch: notices what other programs write into the files of chats that are followed here.

    every 0.5 s, per owner with followers:   has the file changed? ──▶ which chats? ──▶ tell, unless
                                                                       this server has changed them

Terminals with a server of their own and `mlxserve chats` write into the same files. A change is told at
the look after the one that found it, so that this server's own writes have been told by then.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Collection
from contextvars import Context
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from mlxserve.core.errors import QueueFull
from mlxserve.helpers.fair_executor import FairExecutor
from mlxserve.helpers.work import Work
from mlxserve.history.chat_file import StoreError
from mlxserve.history.chat_stores import ChatStores
from mlxserve.history.messages import ChatRecord
from mlxserve.history.store import ChatStamp, Store

T = TypeVar("T")
logger = logging.getLogger(__name__)

LOOK_SECONDS = 0.5  # between looks
ALL = 0  # the id of no chat: this server has changed several
_SECONDS = 0.005  # for reading the stamps of a few thousand chats

# Tells followers of a chat that has changed; None for one that was deleted.
Tell = Callable[[str, int, ChatRecord | None], None]


@dataclass(slots=True)
class _Watched:
    """The chats of one owner as they were at the last look.

    found: ids of chats that the last look found changed
    own, own_before: ids of chats that this server has changed since the last look, and before it
    """

    version: object = None
    stamps: dict[int, ChatStamp] | None = None
    found: set[int] = field(default_factory=set)
    own: set[int] = field(default_factory=set)
    own_before: set[int] = field(default_factory=set)

    def is_own(self, chat_id: int) -> bool:
        return not {chat_id, ALL}.isdisjoint(self.own | self.own_before)


class FileWatch:
    """Looks for changes of files whose chats have followers. Used in the event loop only."""

    def __init__(
        self,
        stores: ChatStores,
        executor: FairExecutor,
        followed: Callable[[], Collection[str]],
        tell: Tell,
    ) -> None:
        """followed: the owners whose chats have followers now."""
        self._stores = stores
        self._executor = executor
        self._followed = followed
        self._tell = tell
        self._owners: dict[str, _Watched] = {}
        self._task: asyncio.Task[None] | None = None
        self._is_woken = asyncio.Event()

    def begin(self) -> None:
        """Look now, and from then on while there are followers."""
        self._is_woken.set()
        if self._task is None or self._task.done():
            # An empty context: the one of the request of a follower holds that request.
            loop = asyncio.get_running_loop()
            self._task = loop.create_task(self._watch(), context=Context())

    def note_own(self, owner: str, chat_id: int) -> None:
        """Note that this server has changed a chat, and tells so itself."""
        if owner in self._owners:
            self._owners[owner].own.add(chat_id)

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _watch(self) -> None:
        while owners := self._followed():
            self._is_woken.clear()
            for owner in owners:
                try:
                    await self._look(owner, self._owners.setdefault(owner, _Watched()))
                except QueueFull:
                    continue  # the next look finds it
                except StoreError as error:
                    logger.warning("%s", error)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._is_woken.wait(), LOOK_SECONDS)

    async def _look(self, owner: str, watched: _Watched) -> None:
        if self._stores.is_running(owner):
            return  # what it writes is not told yet
        await self._tell_found(owner, watched)
        version = self._stores.version(owner)
        if version != watched.version:
            stamps = await self._read(owner, Store.stamps)
            if watched.stamps is not None:
                changed = dict(stamps.items() ^ watched.stamps.items())
                watched.found = {each for each in changed if not watched.is_own(each)}
            watched.version, watched.stamps = version, stamps
        watched.own_before, watched.own = watched.own, set()

    async def _tell_found(self, owner: str, watched: _Watched) -> None:
        for chat_id in sorted(watched.found):
            if not watched.is_own(chat_id):
                chat = await self._read(owner, partial(_chat, chat_id))
                own = set(watched.own)
                self._tell(owner, chat_id, chat)
                watched.own = own  # what others have changed is not this server's
            watched.found.discard(chat_id)

    def _read(self, owner: str, work: Callable[[Store], T]) -> Awaitable[T]:
        reading: Work[T] = Work(_SECONDS, partial(self._stores.run, owner, work))
        return self._executor.run(owner, reading)


def _chat(chat_id: int, store: Store) -> ChatRecord | None:
    try:
        return store.chat(chat_id)
    except StoreError:
        return None

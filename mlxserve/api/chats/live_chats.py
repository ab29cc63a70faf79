"""LiveChats: the chats that are followed or answered now, by their owner."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from starlette.types import ASGIApp

from mlxserve.api.chats.answer_writer import AnswerOrder, AnswerWriter, Services
from mlxserve.api.chats.feed import ChatFeed
from mlxserve.api.chats.file_watch import ALL, FileWatch
from mlxserve.api.chats.forms import card_of, event_form
from mlxserve.api.chats.growing_answer import GrowingAnswer
from mlxserve.api.chats.in_process import InProcess
from mlxserve.api.errors import ApiError
from mlxserve.api.page.rendering import Renderer
from mlxserve.helpers.fair_executor import FairExecutor
from mlxserve.history.chat_stores import ChatStores
from mlxserve.history.messages import ChatRecord, StoredMessage
from mlxserve.mcp.toolbox import Toolbox

MAX_FOLLOWERS = 64  # of all chats of one owner
LIST = ALL  # the id of no chat: in its place, an owner's list of chats
_MAX_IDLE = 16  # chats without followers whose events are kept, for those that come back


@dataclass(slots=True)
class LiveChat:
    """A chat that is followed or answered.

    writer: writes its answer; None while there is none
    is_reserved: an answer is about to be written
    """

    feed: ChatFeed = field(default_factory=ChatFeed)
    writer: AnswerWriter | None = None
    is_reserved: bool = False

    @property
    def is_idle(self) -> bool:
        return not self.is_reserved and self.writer is None and not self.feed.num_followers

    def reserve(self) -> None:
        """Let no other answer begin. Raises ApiError 409."""
        if self.is_reserved or self.writer is not None:
            raise ApiError(
                409,
                "This chat is being answered. Wait for the answer, or stop it.",
                code="answer_running",
            )
        self.is_reserved = True


class LiveChats:
    """The live chats of a server. Used in the event loop only."""

    def __init__(self, stores: ChatStores, executor: FairExecutor, toolbox: Toolbox) -> None:
        self._stores = stores
        self._executor = executor
        self._toolbox = toolbox
        self._services: Services | None = None
        self._chats: dict[tuple[str, int], LiveChat] = {}  # the one used last is last
        self._tasks: set[asyncio.Task[None]] = set()
        self._watch = FileWatch(stores, executor, self._followed, self._told_by_file)

    def attach(self, app: ASGIApp) -> None:
        """Name the application that answers: the one that these chats are a part of."""
        self._services = Services(
            InProcess(app), self._stores, self._executor, Renderer(), self._toolbox
        )

    def chat(self, owner: str, chat_id: int) -> LiveChat:
        """Return a chat as live, and forget some that are idle."""
        key = (owner, chat_id)
        found = self._chats.pop(key, None) or LiveChat()
        idle = [each for each, chat in self._chats.items() if chat.is_idle]
        for each in idle[: len(idle) - _MAX_IDLE]:
            del self._chats[each]
        self._chats[key] = found
        self._watch.begin()
        return found

    def _followed(self) -> set[str]:
        """Return the owners whose chats have followers."""
        return {owner for (owner, _), chat in self._chats.items() if chat.feed.num_followers}

    def _told_by_file(self, owner: str, chat_id: int, chat: ChatRecord | None) -> None:
        """Tell followers what another program has written."""
        if chat is None:
            self.deleted(owner, chat_id)
        else:
            self.changed(owner, chat)

    def known(self, owner: str, chat_id: int) -> LiveChat | None:
        """Return a chat if it is live."""
        return self._chats.get((owner, chat_id))

    def check_followers(self, owner: str) -> None:
        """Raises ApiError 429 if the owner's chats have all the followers that they may."""
        own = (chat for (each, _), chat in self._chats.items() if each == owner)
        if sum(chat.feed.num_followers for chat in own) >= MAX_FOLLOWERS:
            raise ApiError(
                429,
                f"{MAX_FOLLOWERS} followers of chats are connected already. Close some pages.",
                code="too_many_followers",
                headers={"retry-after": "5"},
            )

    # ---- what was written

    def changed(self, owner: str, chat: ChatRecord) -> None:
        """Tell followers the title and the end of the shown branch, and others of the owner's list."""
        self._publish(owner, chat.id, lambda feed: feed.publish("chat", card_of(chat)))
        self.listed(owner, chat.id)

    def added(self, owner: str, message: StoredMessage) -> None:
        """Tell followers of a message that was added or changed."""
        self._watch.note_own(owner, message.chat_id)
        self._publish(
            owner, message.chat_id, lambda feed: feed.publish("message", event_form(message))
        )

    def listed(self, owner: str, chat_id: int = LIST) -> None:
        """Tell followers of the owner's other chats, and of the list, that the list has changed.

        chat_id: the chat that was made, changed or deleted; LIST for several
        """
        self._watch.note_own(owner, chat_id)
        event = {"id": chat_id or None}
        for (each, number), chat in self._chats.items():
            if each == owner and (number != chat_id or number == LIST):
                _tell(chat.feed, lambda feed: feed.publish("list", event))

    def deleted(self, owner: str, chat_id: int) -> None:
        """Tell followers, end them, and stop the chat's answer."""
        chat = self._chats.pop((owner, chat_id), None)
        self.listed(owner, chat_id)
        if chat is None:
            return
        if chat.writer is not None:
            chat.writer.stop(is_deleted=True)
        chat.feed.publish("deleted", {"id": chat_id})
        chat.feed.end()

    def _publish(self, owner: str, chat_id: int, publish: Callable[[ChatFeed], None]) -> None:
        chat = self.known(owner, chat_id)
        if chat is not None:
            _tell(chat.feed, publish)

    # ---- answers

    def begin(self, chat: LiveChat, order: AnswerOrder, message: StoredMessage) -> None:
        """Begin to write an answer in a chat that was reserved for it."""
        assert self._services is not None, "attached before the first request"
        writer = AnswerWriter(self._services, order, GrowingAnswer(message), chat.feed)
        chat.writer, chat.is_reserved = writer, False
        task = writer.start()
        self._tasks.add(task)

        def ended(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            chat.writer = None

        task.add_done_callback(ended)

    async def close(self) -> None:
        """Stop all answers, which are stored as far as they came, and end all followers."""
        await self._watch.close()
        for chat in self._chats.values():
            if chat.writer is not None:
                chat.writer.stop()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for chat in self._chats.values():
            chat.feed.end()


def _tell(feed: ChatFeed, publish: Callable[[ChatFeed], None]) -> None:
    """Publish to followers; without any, whoever comes back begins with the state."""
    if feed.num_followers:
        publish(feed)
    else:
        feed.forget()

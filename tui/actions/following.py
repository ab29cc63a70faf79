"""Following: follows the open chat on a server that keeps its chats in the terminal's file.

    events of the chat -> the running answer's queue -> pieces on the screen
                       -> `noticed`: an answer runs, or the chat has changed

A lost connection is opened again after the last event. Servers with other chats, on another machine or
of another kind, are not followed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from mlxserve.system.terminal_text import one_line
from tui.actions.server_link import ServerLink
from tui.chat.followed_answer import EventQueue
from tui.chat.open_chat import OpenChat
from tui.talk.connection import ServerConnection
from tui.talk.errors import ChatError, NoChat
from tui.talk.pieces import ChatEvent
from tui.widgets.window import ChatWindow
from tui.workers import start_worker

_AGAIN_SECONDS = 0.5  # between two tries to connect
_OF_ANSWER = ("text", "thinking", "round", "request", "question")
_AWAY = "The connection to the server was lost. Connecting again …"
_DELETED = "This chat was deleted elsewhere."


@dataclass(eq=False, slots=True)
class FollowedChat:
    """A chat on a server, and what is known of it there.

    is_shared: whether the server's chats are the terminal's, once that is known
    running: the id of the answer that is being written
    last: the last event that has arrived
    log: events of the running answer, or of all answers since `is_asking` was set
    left: the id of an answer that could not be followed to its end
    unseen, card, has_changed: messages that were written, the newest title, prompt and end of the
        branch, and anything else that may not be on the screen
    """

    connection: ServerConnection
    chat_id: int
    is_shared: asyncio.Future[bool] = field(default_factory=asyncio.Future)
    running: int | None = None
    log: list[ChatEvent] = field(default_factory=list)
    is_asking: bool = False
    last: ChatEvent | None = None
    left: int | None = None
    unseen: set[int] = field(default_factory=set)
    card: Mapping[str, Any] | None = None
    has_changed: bool = False

    @property
    def is_followed(self) -> bool:
        return self.is_shared.done() and self.is_shared.result()


class Following:
    """Follows at most one chat.

    noticed: called when an answer begins or ends, or the chat has changed
    """

    def __init__(
        self,
        open_chat: OpenChat,
        link: ServerLink,
        window: ChatWindow,
        noticed: Callable[[], None],
    ) -> None:
        self._open_chat = open_chat
        self._link = link
        self._window = window
        self._noticed = noticed
        self._queue: EventQueue | None = None
        self.question: Mapping[str, Any] | None = None  # whether a call may be made
        self.chat: FollowedChat | None = None
        self.is_deleted = False  # the chat that was followed last

    @property
    def may_follow(self) -> bool:
        """True if the server may have the terminal's chats."""
        connection = self._link.connection
        return connection is not None and connection.is_ours

    def retarget(self) -> None:
        """Follow the chat that is open now, on the server of this moment."""
        connection, chat = self._link.connection, self._open_chat.chat
        target = None if connection is None or chat is None else (connection, chat.id)
        known = self.chat
        is_same = known is not None and (known.connection, known.chat_id) == target
        if known is not None and is_same and (known.is_followed or not known.is_shared.done()):
            return
        self.leave()
        if connection is not None and chat is not None and self.may_follow:
            self.chat = FollowedChat(connection, chat.id)
            start_worker(
                self._window, partial(self._read, self.chat), group="follow", exclusive=True
            )

    def leave(self, reason: str = _AWAY) -> None:
        """Follow no chat. An answer that is followed ends here."""
        chat, self.chat, self.question = self.chat, None, None
        if chat is not None and not chat.is_shared.done():
            chat.is_shared.set_result(False)
        if self._queue is not None:
            self._queue.fail(ChatError(reason))

    async def attach(self) -> FollowedChat | None:
        """Return the open chat as followed; None if the server does not have it."""
        self.retarget()
        chat = self.chat
        return chat if chat is not None and await asyncio.shield(chat.is_shared) else None

    def listen(self, queue: EventQueue) -> None:
        """Put the events of an answer into a queue: what has happened of it, and what will."""
        self._queue, chat = queue, self.chat
        if chat is None or not chat.is_followed:
            queue.fail(ChatError(_AWAY))
            return
        log, chat.log, chat.is_asking = chat.log, [], False
        for event in log:
            self._forward(event)

    def _forward(self, event: ChatEvent) -> None:
        queue = self._queue
        if queue is not None and (event.name == "state" or event.data.get("id") == queue.id):
            queue.put(event)

    def is_stale(self) -> bool:
        """True, once, if something was written in the chat that is not on the screen."""
        chat = self.chat
        if chat is None or not chat.is_followed:
            return False
        unseen = chat.unseen.difference(message.id for message in self._open_chat.path)
        is_stale = chat.has_changed or bool(unseen) or self._differs(chat.card)
        chat.unseen, chat.card, chat.has_changed = set(), None, False
        return is_stale

    def ignore(self) -> None:
        """The answer of the last `listen` is followed no longer."""
        self._queue = None

    # ---- reading

    async def _read(self, chat: FollowedChat) -> None:
        """Follow a chat, also when the server is away for a while."""
        problem: ChatError | None = None
        while True:
            was_away, problem = problem is not None, None
            try:
                if not await self._listen(chat):
                    return
            except ChatError as error:
                problem = error
            if problem is not None and not self._may_come_back(chat, problem):
                return
            if problem is not None and chat.running is not None and not was_away:
                self._window.notify(_AWAY, severity="warning")
            await asyncio.sleep(_AGAIN_SECONDS)

    async def _listen(self, chat: FollowedChat) -> bool:
        """Take the events of one connection; False to follow no longer. Raises ChatError."""
        events = chat.connection.client.chats.events(chat.chat_id, chat.last)
        async with aclosing(events):
            async for event in events:
                chat.last = None if event.name == "error" else event
                if self.chat is not chat or not await self._take(chat, event):
                    return False
        return True

    def _may_come_back(self, chat: FollowedChat, error: ChatError) -> bool:
        """False, once the chat or its server is gone."""
        if isinstance(error, NoChat):
            self.is_deleted = chat.is_followed
        elif chat.is_followed and not self._link.has_lost(chat.connection):
            return True
        self._end(chat, str(error))
        return False

    def _end(self, chat: FollowedChat, reason: str) -> None:
        """The server is gone, or does not have the chat."""
        if not chat.is_shared.done():
            chat.is_shared.set_result(False)
        if self.chat is chat:
            self.leave(reason)
            self._noticed()

    async def _take(self, chat: FollowedChat, event: ChatEvent) -> bool:
        """Note what has happened; False if the server's chats are others."""
        if event.name == "state":
            store = event.data.get("store")
            if not store or store != await self._open_chat.identity():
                self._end(chat, "")
                return False
            self._take_state(chat, event)
        elif event.name == "deleted":
            self.is_deleted = True
            self._end(chat, _DELETED)
            return False
        else:
            self._take_event(chat, event)
        self._noticed()
        return True

    def _take_state(self, chat: FollowedChat, event: ChatEvent) -> None:
        answer = event.data["answer"]
        chat.running = None if answer is None else int(answer["id"])
        chat.log = [*chat.log, event] if chat.is_asking else [event]
        chat.card = event.data["chat"]
        self.question = None if answer is None else _asked(answer)
        if chat.is_shared.done():  # connected again
            chat.has_changed = True
        else:
            chat.is_shared.set_result(True)
        self._forward(event)

    def _take_event(self, chat: FollowedChat, event: ChatEvent) -> None:
        match event.name:
            case "message":
                chat.unseen.add(int(event.data["id"]))
                if event.data.get("state") == "writing":
                    self._begin(chat, event)
            case "chat":
                chat.card = event.data
            case "unsaved" if event.data["problem"]:
                self._window.notify(one_line(event.data["problem"], 300), severity="error")
            case "decided":
                self.question = None
            case "end":
                chat.running, self.question = None, None
                chat.has_changed |= self._queue is None
                self._log(chat, event)
            case name if name in _OF_ANSWER:
                self._take_growth(chat, event)
        self._forward(event)

    def _take_growth(self, chat: FollowedChat, event: ChatEvent) -> None:
        if chat.running is None:  # its message was too large for an event
            self._begin(chat, event)
        if event.name == "question":
            self.question = event.data
        self._log(chat, event)

    def _log(self, chat: FollowedChat, event: ChatEvent) -> None:
        if self._queue is None:
            chat.log.append(event)

    def _begin(self, chat: FollowedChat, event: ChatEvent) -> None:
        chat.running = int(event.data["id"])
        if chat.left == chat.running:  # it goes on
            chat.left = None
        if not chat.is_asking:
            chat.log = []

    def _differs(self, card: Mapping[str, Any] | None) -> bool:
        """True if what the server says of the open chat is not what is shown."""
        chat = self._open_chat.chat
        if card is None or chat is None:
            return False
        shown = (chat.title, chat.system, self._open_chat.leaf_id)
        return shown != (card["title"], card["system"], card["leaf_id"])


def _asked(answer: Mapping[str, Any]) -> Mapping[str, Any] | None:
    question = answer["question"]
    return None if question is None else {"id": answer["id"], **question}

"""ServerAnswers: asks through a server that keeps the chats, and shows what others ask there.

    ask ─▶ POST …/answers ─▶ the server writes ─▶ events ─▶ the same view as any answer

Closing the terminal, or opening another chat, leaves the answer to the server; Esc stops it there.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict
from functools import partial
from typing import Any, Protocol

from textual.worker import Worker

from mlxserve.history.messages import NewQuestion, State, StoredMessage
from mlxserve.mcp.toolbox import Tool
from tui.actions.following import FollowedChat, Following
from tui.actions.server_link import ServerLink
from tui.actions.tool_use import ToolUse
from tui.chat.followed_answer import EventQueue, FollowedAnswer
from tui.chat.open_chat import OpenChat, images_of, parent_of_next
from tui.chat.operations import Operation
from tui.talk.connection import ServerConnection
from tui.talk.errors import ChatBusy, ChatError, NoReply, StaleChat
from tui.widgets.window import ChatWindow
from tui.workers import start_worker

_GONE_ON = (
    "This chat has gone on elsewhere, and is shown as it is now. Your message is in the composer: "
    "Enter sends it after that."
)
_RELOADED = "This chat has gone on elsewhere, and is shown as it is now. Nothing was asked."

Fields = Mapping[str, float | int | str]


class ShowAnswer(Protocol):
    """Shows an answer while it grows, to its end."""

    def __call__(
        self, answer: FollowedAnswer, connection: ServerConnection, *, is_own: bool
    ) -> Awaitable[None]: ...


class ServerAnswers:
    """Owns the follower of the open chat.

    show: shows an answer inside an operation
    give_back: puts a question that was not asked into the composer
    noticed: called when there may be an operation to run
    """

    def __init__(
        self,
        open_chat: OpenChat,
        link: ServerLink,
        window: ChatWindow,
        tools: ToolUse,
        *,
        show: ShowAnswer,
        give_back: Callable[[NewQuestion], None],
        noticed: Callable[[], None],
    ) -> None:
        self._open_chat = open_chat
        self._window = window
        self._tools = tools
        self._show = show
        self._give_back = give_back
        self._wake = noticed
        self._question: Mapping[str, Any] | None = None  # the one that a dialog asks
        self._dialog: Worker[None] | None = None
        self._following = Following(open_chat, link, window, self._noticed)
        self.is_closing = False
        self.on_deleted: Callable[[], None] = lambda: None  # called when the open chat is gone

    def retarget(self) -> None:
        """Follow the chat that is open now."""
        self._following.retarget()

    def announce(self) -> None:
        """Tell other followers what was written here."""
        chat = self._following.chat
        if chat is not None and chat.is_followed:
            start_worker(self._window, partial(_announce, chat))

    def next_operation(self) -> Operation | None:
        """Return an operation that shows what others have begun or written."""
        following, open_chat = self._following, self._open_chat.chat
        chat = following.chat
        if self.is_closing or chat is None or not chat.is_followed or open_chat is None:
            return None
        if chat.chat_id != open_chat.id:
            return None
        if chat.running is not None and chat.running != chat.left:
            return partial(self._join, chat, chat.running)
        return self._reload if following.is_stale() else None

    # Operations

    async def ask(
        self, question: NewQuestion, instead_of: StoredMessage | None, model: str, fields: Fields
    ) -> bool:
        """Ask a question and follow its answer; False if the server does not keep this chat."""
        if not self._following.may_follow:
            return False
        await self._open_chat.begin(question.text)
        body: dict[str, Any] = {
            "parent_id": parent_of_next(self._open_chat.path, instead_of),
            "text": question.text,
            "images": [asdict(image) for image in images_of(question, instead_of)],
            "model": model,
            **fields,
        }
        return await self._begin(body, question)

    async def reply(self, question: StoredMessage, model: str, fields: Fields) -> bool:
        """Answer a question of the chat once more; False if the server does not keep it."""
        return await self._begin({"parent_id": question.id, "model": model, **fields}, None)

    async def resume(self, answer: StoredMessage, model: str, fields: Fields) -> bool:
        """Go on with an answer; False if the server does not keep this chat."""
        return await self._begin({"continues": answer.id, "model": model, **fields}, None)

    async def _begin(self, body: Mapping[str, Any], question: NewQuestion | None) -> bool:
        chat = await self._following.attach()
        if chat is None:
            return False
        chat.is_asking, chat.log = True, []
        ask = {"leaf_id": self._open_chat.leaf_id, **body}
        try:
            answer_id = await chat.connection.client.chats.begin(chat.chat_id, ask)
        except ChatError as error:
            chat.is_asking = False
            if isinstance(error, NoReply) and not await self._has_gone_on(chat):
                return False
            await self._show_refusal(error, chat, question)
            return True
        # The server leaves the branch of an answer that the model refuses, and that may have happened by now.
        await self._show_branch(chat, answer_id)
        if question is not None:
            self._window.composer.remember(question.text)
        await self._follow(chat, answer_id, is_own=True)
        return True

    async def _has_gone_on(self, chat: FollowedChat) -> bool:
        """True if something was written in the chat since it was shown: a lost reply may have been of that."""
        before = self._open_chat.leaf_id
        await self._open_chat.open(chat.chat_id)
        return self._open_chat.leaf_id != before

    async def _show_refusal(
        self, error: ChatError, chat: FollowedChat, question: NewQuestion | None
    ) -> None:
        words = str(error)
        if isinstance(error, StaleChat):
            await self._show_branch(chat)
            words = _RELOADED if question is None else _GONE_ON
        if question is not None:
            self._give_back(question)
        is_error = not isinstance(error, StaleChat | ChatBusy)
        await self._window.transcript.say(words, is_error=is_error)

    async def _join(self, chat: FollowedChat, answer_id: int) -> None:
        """Follow an answer that another client has asked for."""
        await self._show_branch(chat)
        await self._follow(chat, answer_id, is_own=False)

    async def _reload(self) -> None:
        if (chat := self._following.chat) is not None:
            await self._show_branch(chat)

    async def _show_branch(self, chat: FollowedChat, message_id: int | None = None) -> None:
        """Show the branch that the store shows now, or the one through a message."""
        await self._open_chat.open(chat.chat_id, message_id)
        await self._window.show(self._open_chat)

    async def _follow(self, chat: FollowedChat, answer_id: int, *, is_own: bool) -> None:
        message = next((each for each in self._open_chat.path if each.id == answer_id), None)
        if message is None or (message.state is not State.WRITING and not is_own):
            chat.is_asking, chat.left = False, answer_id
            return
        queue = EventQueue(message)

        def stop() -> None:
            start_worker(self._window, partial(_stop, chat, queue))

        answer = FollowedAnswer(message, queue, stop=stop, read_stored=self._open_chat.reload)
        self._following.listen(queue)
        try:
            await self._show(answer, chat.connection, is_own=is_own)
        finally:
            self._following.ignore()
            if not answer.is_left:
                chat.left = answer_id

    # What the follower notices

    def _noticed(self) -> None:
        self._ask_about_call()
        if self._following.is_deleted:
            self._following.is_deleted = False
            self.on_deleted()
        self._wake()

    def _ask_about_call(self) -> None:
        """Show the dialog of a call that waits for a decision, until that is made."""
        question, chat = self._following.question, self._following.chat
        if question is self._question:
            return
        self._question = question
        if self._dialog is not None:
            self._dialog.cancel()
        self._dialog = None
        if question is not None and chat is not None:
            self._dialog = start_worker(self._window, partial(self._decide, chat, question))

    async def _decide(self, chat: FollowedChat, question: Mapping[str, Any]) -> None:
        tool = Tool(
            name=str(question["name"]),
            server=str(question["server"]),
            tool=str(question["tool"]),
            description=str(question["description"]),
            schema={},
        )
        decision = await self._tools.decision(tool, str(question["arguments"]))
        chats, answer_id = chat.connection.client.chats, int(question["id"])
        try:
            if decision is None:
                await chats.stop(chat.chat_id, answer_id)
            else:
                call_id = str(question["call_id"])
                await chats.decide(chat.chat_id, answer_id, call_id, decision.value)
        except ChatError as error:
            self._window.notify(str(error), severity="error")


async def _stop(chat: FollowedChat, queue: EventQueue) -> None:
    """Have the server stop an answer; without the server it ends here."""
    try:
        await chat.connection.client.chats.stop(chat.chat_id, queue.id)
    except ChatError as error:
        queue.fail(error)


async def _announce(chat: FollowedChat) -> None:
    try:
        await chat.connection.client.chats.announce(chat.chat_id)
    except ChatError:
        return  # they read the chat when they connect again

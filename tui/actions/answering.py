"""Answering: asks the questions of the open chat and follows the running answer to its end.

    send -> queue -> operation -> open chat (written first) -> live answer -> view (painted by a timer)
                               -> a server that keeps the chats (`ServerAnswers`) -> the same

One operation at a time (`Operations`); messages sent meanwhile wait in the queue.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace
from functools import partial

from mlxserve.history.calls import CallsPiece
from mlxserve.history.chat_file import StoreError
from mlxserve.history.messages import CAN_CONTINUE, NewQuestion, Role, State, StoredMessage
from mlxserve.history.traces import Traces
from tui.actions.chat_status import ChatStatus
from tui.actions.forgetting import forget_pages
from tui.actions.question_queue import QuestionQueue
from tui.actions.server_answers import ServerAnswers
from tui.actions.server_link import ServerLink
from tui.actions.shortening import FULL, Shortening
from tui.actions.tool_use import ToolUse
from tui.chat.live_answer import LiveAnswer
from tui.chat.open_chat import OpenChat
from tui.chat.operations import Operation, Operations
from tui.chat.progress import watch_progress
from tui.chat.sampling import Sampling
from tui.talk.connection import ServerConnection
from tui.talk.errors import ContextFull
from tui.talk.pieces import Piece
from tui.widgets.message import AnswerView
from tui.widgets.window import ChatWindow
from tui.workers import start_worker

_FRAMES_PER_SECOND = 15


class Answering:
    """Runs at most one answer at a time."""

    def __init__(
        self, open_chat: OpenChat, link: ServerLink, window: ChatWindow, tools: ToolUse
    ) -> None:
        self._tools = tools
        self._open_chat = open_chat
        self._link = link
        self._window = window
        self._operations = Operations(partial(start_worker, window, group="operation"))
        self.queue = QuestionQueue(window)
        self.status = ChatStatus(
            open_chat, link, window, lambda: [tools.label, self.sampling.label]
        )
        self._has_reported_unsaved = False
        self._shortening = Shortening(open_chat, link, window)
        self._full_chat: int | None = None  # the chat whose last question did not fit
        # An answer whose server ended, or a question asked without a server.
        self._lost: StoredMessage | None = None
        self._request_ids: dict[int, str] = {}  # chat id -> the server's id of its last answer
        self.sampling = Sampling()
        self.server = ServerAnswers(
            open_chat,
            link,
            window,
            tools,
            show=self._follow,
            give_back=self.queue.give_back,
            noticed=self.send_next,
        )
        self.has_left_answer = False  # to the server, when the terminal was closed

    @property
    def is_busy(self) -> bool:
        return not self._operations.is_idle or self._link.connection is None

    @property
    def is_answering(self) -> bool:
        return self._operations.answer is not None

    @property
    def last_answer(self) -> StoredMessage | None:
        """The running answer, or the last one of the open chat."""
        if self._operations.answer is not None:
            return self._operations.answer.message
        path = self._open_chat.path
        return next((m for m in reversed(path) if m.role is Role.ASSISTANT), None)

    @property
    def request_id(self) -> str | None:
        """The server's id of the open chat's last answer."""
        if self._operations.answer is not None:
            return self._operations.answer.request_id
        chat = self._open_chat.chat
        return None if chat is None else self._request_ids.get(chat.id)

    @property
    def is_full(self) -> bool:
        """True if the open chat's last question was refused because it did not fit."""
        chat = self._open_chat.chat
        return chat is not None and chat.id == self._full_chat

    # Operations

    def run(self, operation: Operation, *, leaves: bool = False) -> None:
        """Stop the running answer, or leave it to its server, then run this operation."""
        self._operations.begin(partial(self._guarded, operation), self.send_next, leaves=leaves)

    def run_when_connected(self, operation: Operation) -> None:
        if self._link.connection is None:
            self._window.notify("Not connected yet; try again when the server is ready.")
        else:
            self.run(operation)

    def continue_last(self) -> None:
        path = self._open_chat.path
        if path and path[-1].state in CAN_CONTINUE and (path[-1].text or path[-1].rounds):
            self.run_when_connected(partial(self.continue_answer, path[-1]))
        else:
            self._window.notify("Nothing to continue: the last answer was not stopped or cut off.")

    def compact(self) -> None:
        """Replace the oldest messages by a summary."""
        if self._open_chat.path:
            self.run_when_connected(self._compact)
        else:
            self._window.notify("This chat is empty: send a message first.")

    def continue_shorter(self) -> None:
        """Continue a full chat without its oldest messages."""
        if self.is_full and not self.is_answering:
            self.run_when_connected(self._ask_shorter)

    def stop(self) -> None:
        """Stop the running answer and keep its text so far."""
        self._operations.stop_answer()

    async def finish(self) -> None:
        """Stop the running answer, or leave it to its server; wait for every operation to end."""
        self.server.is_closing = True
        answer = self._operations.answer
        await self._operations.finish()
        self.has_left_answer = answer is not None and answer.is_left

    async def _guarded(self, operation: Operation) -> None:
        try:
            await operation()
        except StoreError as error:
            await self._window.transcript.say(str(error), is_error=True)
        if self._open_chat.has_written:
            self._open_chat.has_written = False
            self.server.announce()

    # Questions and answers

    def send(self, question: NewQuestion) -> None:
        """Ask a question now, or after the running operation."""
        self.queue.add(question)
        self.send_next()

    def send_next(self) -> None:
        """Run what waits, or ask the next question, unless something is running, also for another client."""
        if self._operations.is_idle and (first := self.queue.take_operation()) is not None:
            self.run(first)
        elif self.is_busy:
            return
        elif (operation := self.server.next_operation()) is not None:
            self.run(operation)
        elif (question := self.queue.take()) is not None:
            self.run(partial(self.ask, question))

    async def ask(self, question: NewQuestion, instead_of: StoredMessage | None = None) -> None:
        """Store a question, or a new version of an earlier one, and answer it."""
        self._full_chat = None
        try:
            if await self.server.ask(question, instead_of, self._link.model, self.sampling.fields):
                return
            stored = await self._open_chat.ask(question, instead_of=instead_of)
        except StoreError:
            self.queue.give_back(question)
            raise
        self._window.composer.remember(question.text)
        await self.reply(stored)

    async def reply(self, question: StoredMessage) -> None:
        """Answer a question of the open chat."""
        connection = self._link.connection
        if connection is None:
            self._lost = question
            await self._show_not_connected()
            return
        self._full_chat = None
        if await self.server.reply(question, connection.model, self.sampling.fields):
            return
        stays_on_message = self._window.is_on_message
        message = await self._open_chat.begin_answer(question, connection.model)
        await self._window.show(self._open_chat)
        pieces = self._pieces(connection)
        if stays_on_message and (view := self._window.transcript.view(message.id)) is not None:
            view.focus()
        else:
            self._window.composer.focus()
        await self._follow(LiveAnswer(message, pieces, self._save), connection)

    async def _ask_shorter(self) -> None:
        if await self._shortening.leave_out_oldest():
            await self._shortened()

    async def _compact(self) -> None:
        if await self._shortening.summarise():
            await self._shortened()
        self.status.show_ready()

    async def _shortened(self) -> None:
        last = self._open_chat.path[-1]
        await self._window.show(self._open_chat)
        if last.role is Role.USER:
            await self.reply(last)
        else:
            await self._window.transcript.say(
                "From now on the model gets a summary of the messages above, which stay here."
            )

    async def continue_answer(self, answer: StoredMessage) -> None:
        """Continue an answer that was stopped or cut off."""
        connection = self._link.connection
        if connection is None:
            await self._show_not_connected()
            return
        self._window.composer.focus()
        if await self.server.resume(answer, connection.model, self.sampling.fields):
            return
        continued = replace(answer, state=State.WRITING, error="")
        await self._open_chat.save(continued)
        pieces = self._pieces(connection, continues=bool(continued.text))
        await self._follow(LiveAnswer(continued, pieces, self._save), connection)

    def _pieces(
        self, connection: ServerConnection, *, continues: bool = False
    ) -> AsyncGenerator[Piece | CallsPiece, None]:
        messages = self._open_chat.wire(reads_files=connection.is_ours)
        fields = self.sampling.fields
        return self._tools.pieces(connection, messages, fields, continues=continues)

    async def forget(self, left: Traces) -> None:
        """Make the server forget its cached pages of a deleted chat."""
        connection, tools = self._link.connection, self._tools.definitions
        if words := await forget_pages(connection, left, tools, self.sampling.fields):
            self._window.notify(words)

    async def _show_not_connected(self) -> None:
        """Report a connection that was lost while the operation waited."""
        await self._window.show(self._open_chat)
        await self._window.transcript.say(
            "Not connected. Press Ctrl+R to reconnect.", is_error=True
        )

    async def _follow(
        self, answer: LiveAnswer, connection: ServerConnection, *, is_own: bool = True
    ) -> None:
        window = self._window
        view = window.transcript.view(answer.message.id)
        assert isinstance(view, AnswerView), "the answer was just added"
        self._has_reported_unsaved = False
        self.status.begin()
        view.follow(answer)
        view.open_thinking(is_open=window.is_thinking_open)
        if is_own:
            window.transcript.anchor()

        def tick() -> None:
            # A tick may be queued before the end and run after it.
            if self._operations.answer is answer:
                view.tick()
                self.status.show_answer(answer)

        ticker = window.set_interval(1 / _FRAMES_PER_SECOND, tick)
        watching = asyncio.create_task(watch_progress(connection.client.engine, answer))
        try:
            message = await self._operations.follow(answer)
        finally:
            watching.cancel()
            ticker.stop()
            if answer.request_id is not None:
                self._request_ids[answer.message.chat_id] = answer.request_id
        if answer.is_left:
            self.queue.return_to_composer()
            return
        if isinstance(answer.failure, ContextFull) and not message.text and not message.rounds:
            await self._show_full(message, answer.failure)
            return
        await view.finish(message)
        await self._show_end(message, answer, connection)

    async def _show_end(
        self, message: StoredMessage, answer: LiveAnswer, connection: ServerConnection
    ) -> None:
        window = self._window
        self.status.show_end(message)
        if answer.cuts:
            await window.transcript.say(f"{answer.cuts}.")
        if message.state in (State.FAILED, State.STOPPED):
            self.queue.return_to_composer()
        if message.state is State.FAILED and self._link.has_lost(connection):
            self._lost = message
            if reason := self._link.why_server_stopped():
                await window.transcript.say(reason, is_error=True)

    def ask_again(self) -> None:
        """Repeat the question that was lost with its server, after a reconnect."""
        lost, self._lost = self._lost, None
        path = self._open_chat.path
        if lost is None or not path or path[-1].id != lost.id:
            return
        question = lost if lost.role is Role.USER else self._open_chat.question_of(lost)
        if question is not None:
            self.run(partial(self.reply, question))

    async def _show_full(self, message: StoredMessage, failure: ContextFull) -> None:
        """Remove the unanswered reply and keep the question."""
        self._full_chat = message.chat_id
        await self._open_chat.remove(message)
        await self._window.show(self._open_chat)
        await self._window.transcript.say(f"{failure}\n{FULL}", is_error=True)
        self.status.show_full()
        self.queue.return_to_composer()

    async def _save(self, message: StoredMessage) -> None:
        try:
            await self._open_chat.save(message)
        except StoreError as error:
            # The answer continues; one notice says that it is not saved.
            if not self._has_reported_unsaved:
                self._has_reported_unsaved = True
                self._window.notify(str(error), severity="error")

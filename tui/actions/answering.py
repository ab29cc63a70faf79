"""Asking and answering: the queue of messages, the running answer, and how it ends.

    send -> queue -> operation -> open chat (written first) -> live answer -> view (painted by a timer)

One operation at a time (`Operations`); messages sent meanwhile wait in the queue.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace
from functools import partial

from mlxserve.history.calls import CallsPiece
from mlxserve.history.chat_file import StoreError
from mlxserve.history.context import ContextUse
from mlxserve.history.messages import CAN_CONTINUE, NewQuestion, Role, State, StoredMessage
from mlxserve.history.traces import Traces
from tui.actions.forgetting import forget_pages
from tui.actions.server_link import ServerLink
from tui.actions.shortening import FULL, Shortening
from tui.actions.tool_use import ToolUse
from tui.chat.live_answer import AnswerPhase, LiveAnswer
from tui.chat.open_chat import OpenChat
from tui.chat.operations import Operation, Operations
from tui.chat.progress import calling_words, stage_words, watch_progress
from tui.chat.sampling import Sampling
from tui.chat.stats_text import seconds_words, stats_lines
from tui.talk.connection import ServerConnection
from tui.talk.errors import ContextFull
from tui.talk.pieces import Piece
from tui.widgets.message import AnswerView
from tui.widgets.window import ChatWindow

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
        self._operations = Operations(partial(window.run_worker, group="operation"))
        self._queue: list[NewQuestion] = []
        self._has_reported_unsaved = False
        self._shortening = Shortening(open_chat, link, window)
        self._full_chat: int | None = None  # the chat whose last question did not fit
        # An answer whose server ended, or a question asked without a server.
        self._lost: StoredMessage | None = None
        self._request_ids: dict[int, str] = {}  # chat id -> the server's id of its last answer
        self._is_thinking_open = False
        self._ticked: tuple[str, float | None] = "", None  # what the last tick said
        self.sampling = Sampling()

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

    def run(self, operation: Operation) -> None:
        """Stop the running answer, then run this operation."""
        self._operations.begin(partial(self._guarded, operation), self.send_next)

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

    def toggle_thinking(self) -> None:
        is_open = self._is_thinking_open = not self._is_thinking_open
        for view in self._window.query(AnswerView):
            view.open_thinking(is_open=is_open)

    def stop(self) -> None:
        """Stop the running answer and keep its text so far."""
        self._operations.stop_answer()

    async def finish(self) -> None:
        """Stop the running answer and wait for every operation to end."""
        await self._operations.finish()

    async def _guarded(self, operation: Operation) -> None:
        try:
            await operation()
        except StoreError as error:
            await self._window.transcript.say(str(error), is_error=True)

    # The queue

    def send(self, asked: NewQuestion) -> None:
        """Ask a question now, or after the running operation."""
        self._queue.append(asked)
        self._show_queue()
        self.send_next()

    def send_next(self) -> None:
        if self._queue and not self.is_busy:
            asked = self._queue.pop(0)
            self._show_queue()
            self.run(partial(self.ask, asked))

    def _show_queue(self) -> None:
        self._window.show_queue([asked.text for asked in self._queue])

    def return_queue(self) -> None:
        """Move queued messages back into the composer: after a failure the user decides."""
        if self._queue:
            composer = self._window.composer
            # Images are read again from the files that the text mentions.
            returned = [one.typed if one.images else one.text for one in self._queue]
            texts = [*returned, composer.text]
            self._queue = []
            self._show_queue()
            composer.write("\n\n".join(text for text in texts if text))

    # Questions and answers

    async def ask(self, asked: NewQuestion, instead_of: StoredMessage | None = None) -> None:
        try:
            question = await self._open_chat.ask(asked, instead_of=instead_of)
        except StoreError:
            self._queue.insert(0, asked)
            self.return_queue()
            raise
        self._window.composer.remember(asked.text)
        await self.reply(question)

    async def reply(self, question: StoredMessage) -> None:
        connection = self._link.connection
        if connection is None:
            self._lost = question
            await self._show_not_connected()
            return
        self._full_chat = None
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
        self.show_ready()

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
        continued = replace(answer, state=State.WRITING, error="")
        await self._open_chat.save(continued)
        pieces = self._pieces(connection, continues=bool(continued.text))
        await self._follow(LiveAnswer(continued, pieces, self._save), connection)

    def _pieces(
        self, connection: ServerConnection, *, continues: bool = False
    ) -> AsyncGenerator[Piece | CallsPiece, None]:
        messages, fields = self._open_chat.wire(), self.sampling.fields
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

    async def _follow(self, answer: LiveAnswer, connection: ServerConnection) -> None:
        window = self._window
        view = window.transcript.view(answer.message.id)
        assert isinstance(view, AnswerView), "the answer was just added"
        self._has_reported_unsaved = False
        self._ticked = "", None
        view.follow(answer)
        view.open_thinking(is_open=self._is_thinking_open)
        window.transcript.anchor()
        ticker = window.set_interval(1 / _FRAMES_PER_SECOND, partial(self._tick, answer, view))
        watching = asyncio.create_task(watch_progress(connection.client.engine, answer))
        try:
            message = await self._operations.follow(answer)
        finally:
            watching.cancel()
            ticker.stop()
            if answer.request_id is not None:
                self._request_ids[answer.message.chat_id] = answer.request_id
        if isinstance(answer.failure, ContextFull) and not message.text and not message.rounds:
            await self._show_full(message, answer.failure)
            return
        await view.finish(message)
        self._show_end(message)
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
        self._window.status.say("This chat is full", style="$error")
        self.return_queue()

    async def _save(self, message: StoredMessage) -> None:
        try:
            await self._open_chat.save(message)
        except StoreError as error:
            # The answer continues; the user is told once that it is not saved.
            if not self._has_reported_unsaved:
                self._has_reported_unsaved = True
                self._window.notify(str(error), severity="error")

    def _tick(self, answer: LiveAnswer, view: AnswerView) -> None:
        if self._operations.answer is not answer:
            return  # a tick that was queued before the end
        view.tick()
        words = {
            AnswerPhase.WAITING: stage_words(answer.progress),
            AnswerPhase.THINKING: f"Thinking, {seconds_words(answer.seconds)}",
            AnswerPhase.WRITING: "Writing",
            AnswerPhase.CALLING: calling_words(answer.rounds),
        }.get(answer.phase, "Done")
        progress = answer.progress if answer.phase is AnswerPhase.WAITING else None
        fraction = None if progress is None else progress.fraction
        if (words, fraction) != self._ticked:
            self._ticked = words, fraction
            self._window.status.say(f"{words} · Esc stops", progress=fraction)
        self._window.status.show_stats(stats_lines(answer.stats, is_live=True))

    def _show_end(self, message: StoredMessage) -> None:
        status = self._window.status
        status.show_stats(stats_lines(message.stats))
        if message.state is State.FAILED:
            status.say("Failed · Ctrl+R retries", style="$error")
        elif message.state is State.STOPPED:
            status.say("Stopped · /continue resumes · Ctrl+R retries")
        else:
            self.show_ready()
            return
        self.return_queue()

    def show_ready(self) -> None:
        """Show that the next message can be sent, and warn if the context is nearly full."""
        use = self.context_use
        if use is None or self._link.is_lost:
            return
        words = "Ready"
        if use.is_nearly_full:
            words += f" · {use.fraction:.0%} of the context is used · /compact frees it"
        self._window.status.say(words)
        self.show_header()

    def show_header(self) -> None:
        """Show the model, the chat's use of its context, and the settings."""
        system = ["with a system prompt"] if self._open_chat.system else []
        settings = [*system, self._tools.words, self.sampling.words]
        self._window.show_header(self._link.model, self.context_use, self._link.address, settings)

    @property
    def context_use(self) -> ContextUse | None:
        """The open chat's use of the model's context; None while not connected."""
        connection = self._link.connection
        if connection is None:
            return None
        return ContextUse(self._open_chat.used_tokens, connection.context)

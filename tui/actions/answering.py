"""Asking and answering: the queue of messages, the running answer, and how it ends.

    send -> queue -> operation -> open chat (written first) -> live answer -> view (painted by a timer)

One operation at a time (`Operations`); messages sent meanwhile wait in the queue.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from functools import partial

from tui.actions.server_link import ServerLink
from tui.chat.live_answer import AnswerPhase, LiveAnswer
from tui.chat.messages import Role, State, StoredMessage, wire_messages
from tui.chat.open_chat import OpenChat
from tui.chat.operations import Operation, Operations
from tui.chat.progress import stage_words, watch_progress
from tui.chat.stats_text import seconds_words, stats_lines
from tui.chat.store import StoreError
from tui.talk.connection import ServerConnection
from tui.widgets.message import AnswerView
from tui.widgets.window import ChatWindow

_FRAMES_PER_SECOND = 15


class Answering:
    """At most one answer at a time."""

    def __init__(
        self,
        open_chat: OpenChat,
        link: ServerLink,
        window: ChatWindow,
        run: Callable[[Coroutine[None, None, None]], object],
    ) -> None:
        self._open_chat = open_chat
        self._link = link
        self._window = window
        self._operations = Operations(run)
        self._queue: list[str] = []
        self._has_reported_unsaved = False
        self._request_ids: dict[int, str] = {}  # chat id -> the server's id of its last answer
        self.is_thinking_open = False

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
        """The server's id of the last answer of the open chat."""
        if self._operations.answer is not None:
            return self._operations.answer.request_id
        chat = self._open_chat.chat
        return None if chat is None else self._request_ids.get(chat.id)

    # Operations

    def run(self, operation: Operation) -> None:
        """Stop the running answer, then run this operation."""
        self._operations.begin(partial(self._guarded, operation), self.send_next)

    def run_when_connected(self, operation: Operation) -> None:
        if self._link.connection is None:
            self._window.notify(
                "Not connected yet; try again when the server is ready.", markup=False
            )
        else:
            self.run(operation)

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

    def send(self, text: str) -> None:
        """Ask it now, or after the running operation."""
        self._queue.append(text)
        self._window.show_queue(self._queue)
        self.send_next()

    def send_next(self) -> None:
        if self._queue and not self.is_busy:
            text = self._queue.pop(0)
            self._window.show_queue(self._queue)
            self.run(partial(self.ask, text))

    def return_queue(self) -> None:
        """Move queued messages back into the composer: after a failure the user decides about them."""
        if self._queue:
            composer = self._window.composer
            texts = [*self._queue, composer.text]
            self._queue = []
            self._window.show_queue(self._queue)
            composer.write("\n\n".join(text for text in texts if text))

    # Questions and answers

    async def ask(self, text: str, instead_of: StoredMessage | None = None) -> None:
        try:
            question = await self._open_chat.ask(text, instead_of=instead_of)
        except StoreError:
            self._queue.insert(0, text)
            self.return_queue()
            raise
        self._window.composer.remember(text)
        await self.reply(question)

    async def reply(self, question: StoredMessage) -> None:
        connection = self._link.connection
        if connection is None:
            await self._show_not_connected()
            return
        message = await self._open_chat.begin_answer(question, connection.model)
        await self._window.show(self._open_chat)
        path = self._open_chat.path[:-1]
        pieces = connection.client.stream(
            wire_messages(path, self._open_chat.system), model=connection.model
        )
        await self._follow(LiveAnswer(message, pieces, self._save), connection)

    async def continue_answer(self, answer: StoredMessage) -> None:
        """Continue an answer that was stopped or cut off."""
        connection = self._link.connection
        if connection is None:
            await self._show_not_connected()
            return
        continued = replace(answer, state=State.WRITING, error="")
        await self._open_chat.save(continued)
        pieces = connection.client.stream(
            wire_messages(self._open_chat.path, self._open_chat.system),
            model=connection.model,
            continues=True,
        )
        await self._follow(LiveAnswer(continued, pieces, self._save), connection)

    async def _show_not_connected(self) -> None:
        """The connection was lost while the operation waited."""
        await self._window.show(self._open_chat)
        await self._window.transcript.say(
            "Not connected. Press Ctrl+R to reconnect.", is_error=True
        )

    async def _follow(self, answer: LiveAnswer, connection: ServerConnection) -> None:
        window = self._window
        window.composer.focus()
        view = window.transcript.view(answer.message.id)
        assert isinstance(view, AnswerView), "the answer was just added"
        self._has_reported_unsaved = False
        view.follow(answer)
        view.open_thinking(is_open=self.is_thinking_open)
        window.transcript.follow()
        ticker = window.set_interval(1 / _FRAMES_PER_SECOND, partial(self._tick, answer, view))
        watching = asyncio.create_task(watch_progress(connection.client.engine, answer))
        try:
            message = await self._operations.follow(answer)
        finally:
            watching.cancel()
            ticker.stop()
            if answer.request_id is not None:
                self._request_ids[answer.message.chat_id] = answer.request_id
        await view.finish(message)
        self._show_end(message)
        if message.state is State.FAILED and (reason := self._link.why_server_stopped()):
            await window.transcript.say(reason, is_error=True)

    async def _save(self, message: StoredMessage) -> None:
        try:
            await self._open_chat.save(message)
        except StoreError as error:
            # The answer continues; the user is told once that it is not saved.
            if not self._has_reported_unsaved:
                self._has_reported_unsaved = True
                self._window.notify(str(error), severity="error", markup=False)

    def _tick(self, answer: LiveAnswer, view: AnswerView) -> None:
        if self._operations.answer is not answer:
            return  # a tick that was queued before the end
        view.tick()
        words = {
            AnswerPhase.WAITING: stage_words(answer.progress),
            AnswerPhase.THINKING: f"Thinking, {seconds_words(answer.seconds)}",
            AnswerPhase.WRITING: "Writing",
        }.get(answer.phase, "Done")
        progress = answer.progress if answer.phase is AnswerPhase.WAITING else None
        fraction = None if progress is None else progress.fraction
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
            status.say("Ready")
            return
        self.return_queue()

"""Asking and answering: what is to be asked, the answer under way, and how both end.

    ask -> turn -> conversation (written first) -> answer (the stream) -> view (painted by a timer)

One turn at a time (`turns.py`); what is sent meanwhile waits in a queue. Knows nothing of SQL,
HTTP or keys.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from functools import partial

from tui.actions.server_link import ServerLink
from tui.chat.live_answer import AnswerPhase, LiveAnswer
from tui.chat.messages import ChatMessage, Role, State, wire_messages
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
        self._view: AnswerView | None = None
        self._queue: list[str] = []
        self._has_said_unsaved = False
        self._request_ids: dict[int, str] = {}  # of each chat's last answer, as the server names it
        self.is_thinking_open = False

    @property
    def is_busy(self) -> bool:
        return not self._operations.is_idle or self._link.connection is None

    @property
    def is_answering(self) -> bool:
        return self._operations.answer is not None

    @property
    def last_answer(self) -> ChatMessage | None:
        """The one that is coming, or the last that came."""
        if self._operations.answer is not None:
            return self._operations.answer.message
        path = self._open_chat.path
        return next((m for m in reversed(path) if m.role is Role.ASSISTANT), None)

    @property
    def request_id(self) -> str | None:
        """What the server calls the last answer of the open chat."""
        if self._operations.answer is not None:
            return self._operations.answer.request_id
        chat = self._open_chat.chat
        return None if chat is None else self._request_ids.get(chat.id)

    # Turns

    def run(self, operation: Operation) -> None:
        """Stop what is coming and do this instead."""
        self._operations.begin(partial(self._guarded, operation), self.send_next)

    def run_when_connected(self, operation: Operation) -> None:
        if self._link.connection is None:
            self._window.notify(
                "Not connected yet; try again when the server is ready.", markup=False
            )
        else:
            self.run(operation)

    def stop(self) -> None:
        """End the answer under way and keep what has come."""
        self._operations.stop_answer()

    async def finish(self) -> None:
        """Stop, and let every turn come to its end."""
        await self._operations.finish()

    async def _guarded(self, operation: Operation) -> None:
        try:
            await operation()
        except StoreError as error:
            await self._window.transcript.say(str(error), is_error=True)

    # What is to be asked

    def send(self, text: str) -> None:
        """Ask it now, or when what is under way has ended."""
        self._queue.append(text)
        self._window.show_queue(self._queue)
        self.send_next()

    def send_next(self) -> None:
        if self._queue and not self.is_busy:
            text = self._queue.pop(0)
            self._window.show_queue(self._queue)
            self.run(partial(self.ask, text))

    def give_queue_back(self) -> None:
        """What waits is not sent after an answer that did not come: the reader decides."""
        if self._queue:
            composer = self._window.composer
            texts = [*self._queue, composer.text]
            self._queue = []
            self._window.show_queue(self._queue)
            composer.write("\n\n".join(text for text in texts if text))

    # Operations of a turn

    async def ask(self, text: str, instead_of: ChatMessage | None = None) -> None:
        try:
            question = await self._open_chat.ask(text, instead_of=instead_of)
        except StoreError:
            self._queue.insert(0, text)
            self.give_queue_back()
            raise
        self._window.composer.remember(text)
        await self.reply(question)

    async def reply(self, question: ChatMessage) -> None:
        connection = self._link.connection
        if connection is None:
            await self._say_not_connected()
            return
        message = await self._open_chat.begin_answer(question, connection.model)
        await self._window.show(self._open_chat)
        path = self._open_chat.path[:-1]
        pieces = connection.client.stream(
            wire_messages(path, self._open_chat.system), model=connection.model
        )
        await self._follow(LiveAnswer(message, pieces, self._save), connection)

    async def go_on(self, answer: ChatMessage) -> None:
        """Write on at the end of an answer that was stopped or cut off."""
        connection = self._link.connection
        if connection is None:
            await self._say_not_connected()
            return
        begun = replace(answer, state=State.WRITING, error="")
        await self._open_chat.save(begun)
        pieces = connection.client.stream(
            wire_messages(self._open_chat.path, self._open_chat.system),
            model=connection.model,
            continues=True,
        )
        await self._follow(LiveAnswer(begun, pieces, self._save), connection)

    async def _say_not_connected(self) -> None:
        """It was lost while the turn waited."""
        await self._window.show(self._open_chat)
        await self._window.transcript.say(
            "Not connected. Press Ctrl+R to try again.", is_error=True
        )

    async def _follow(self, answer: LiveAnswer, connection: ServerConnection) -> None:
        window = self._window
        window.composer.focus()
        view = window.transcript.view(answer.message.id)
        assert isinstance(view, AnswerView), "an answer was just put there"
        self._view = view
        self._has_said_unsaved = False
        view.follow(answer)
        view.open_thinking(is_open=self.is_thinking_open)
        window.transcript.follow()
        ticker = window.set_interval(1 / _FRAMES_PER_SECOND, self._tick)
        watching = asyncio.create_task(watch_progress(connection.client.engine, answer))
        try:
            message = await self._operations.follow(answer)
        finally:
            watching.cancel()
            ticker.stop()
            self._view = None
            if answer.request_id is not None:
                self._request_ids[answer.message.chat_id] = answer.request_id
        await view.finish(message)
        self._show_end(message)
        if message.state is State.FAILED and (words := self._link.last_words()):
            await window.transcript.say(words, is_error=True)

    async def _save(self, message: ChatMessage) -> None:
        try:
            await self._open_chat.save(message)
        except StoreError as error:
            # The answer goes on; the reader is told once that it is not kept.
            if not self._has_said_unsaved:
                self._has_said_unsaved = True
                self._window.notify(str(error), severity="error", markup=False)

    def _tick(self) -> None:
        answer, view = self._operations.answer, self._view
        if answer is None or view is None:
            return
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

    def _show_end(self, message: ChatMessage) -> None:
        status = self._window.status
        status.show_stats(stats_lines(message.stats))
        if message.state is State.FAILED:
            status.say("Failed · Ctrl+R asks again", style="$error")
        elif message.state is State.STOPPED:
            status.say("Stopped · /continue goes on · Ctrl+R asks again")
        else:
            status.say("Ready")
            return
        self.give_queue_back()

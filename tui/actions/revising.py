"""Sends messages, and revises earlier ones: an edited question or another answer is a new version."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from mlxserve.history.messages import NewQuestion, Role, StoredMessage
from tui.actions.answering import Answering
from tui.actions.draft import Draft
from tui.actions.server_link import ServerLink
from tui.chat.open_chat import OpenChat
from tui.widgets.window import ChatWindow
from tui.workers import start_worker


@dataclass
class Revising:
    """Owns the question that is being edited, if there is one."""

    _open_chat: OpenChat
    _link: ServerLink
    _answering: Answering
    _draft: Draft
    _window: ChatWindow
    _editing: StoredMessage | None = None

    @property
    def is_editing(self) -> bool:
        return self._editing is not None

    def send(self, text: str) -> None:
        """Ask, or resend the question that is being edited."""
        if self._draft.has_documents(text):
            start_worker(self._window, partial(self._send_documents, text), group="documents")
        else:
            self._send(self._draft.with_files(text))

    async def _send_documents(self, text: str) -> None:
        self._send(await self._draft.with_documents(text))

    def _send(self, message: NewQuestion | None) -> None:
        if message is None:
            return
        if self._editing is None:
            self._answering.send(message)
        else:
            ask = partial(self._answering.ask, message, self._editing)
            self.end_edit()
            self._answering.run_when_connected(ask)

    def edit(self, message: StoredMessage) -> None:
        """Put a question, or the question of an answer, into the composer."""
        question = self._question(message)
        if question is not None:
            self._editing = question
            self._draft.begin(question.text)
            self._window.hint(is_editing=True)

    def edit_last(self) -> None:
        if self._open_chat.path:
            self.edit(self._open_chat.path[-1])

    def end_edit(self) -> bool:
        """Stop editing; False if nothing was being edited."""
        was_editing, self._editing = self._editing is not None, None
        self._window.hint(is_editing=False)
        return was_editing

    def retry(self, message: StoredMessage) -> None:
        """Regenerate an answer, or the answer of a question."""
        question = self._question(message)
        if question is not None:
            self._say_what_moves(question)
            self._answering.run_when_connected(partial(self._answering.reply, question))

    def retry_last(self) -> None:
        """Regenerate the last answer, or reconnect if not connected."""
        if self._link.is_lost:
            self._link.connect()
        elif self._open_chat.path:
            self.retry(self._open_chat.path[-1])

    def _say_what_moves(self, question: StoredMessage) -> None:
        """Tell the user that messages after a regenerated answer stay with its old version."""
        path = self._open_chat.path
        later = len(path) - path.index(question) - 2 if question in path else 0
        if later > 0:
            noun = "message stays" if later == 1 else "messages stay"
            self._window.notify(f"{later} later {noun} with the version before: Alt+Left shows it.")

    def _question(self, message: StoredMessage) -> StoredMessage | None:
        """The message if it is a question, else the question that it answers."""
        return message if message.role is Role.USER else self._open_chat.question_of(message)

"""Copies an answer, a code block, a message or the selection."""

from __future__ import annotations

from dataclasses import dataclass

from textual.app import App

from mlxserve.history.messages import StoredMessage
from tui.actions.answering import Answering
from tui.actions.clipboard import put_in_clipboard
from tui.paint.markdown import code_blocks


@dataclass
class Copying:
    """Shows a notice for everything copied, or if there is nothing to copy."""

    _app: App[None]
    _answering: Answering
    _copied: tuple[int, int] = (0, 0)  # a message, and how often a block of it was copied in a row

    def message(self, message: StoredMessage) -> None:
        put_in_clipboard(self._app, message.text, "message")

    def answer(self) -> None:
        answer = self._answering.last_answer
        put_in_clipboard(self._app, "" if answer is None else answer.text, "answer")

    def code(self, number: str = "") -> None:
        """Copy the last code block of the last answer, or the one with this number."""
        answer = self._answering.last_answer
        blocks = [] if answer is None else code_blocks(answer.text)
        at = int(number) - 1 if number.isdecimal() else len(blocks) - 1
        if number and not (number.isdecimal() and 0 <= at < len(blocks)):
            self._app.notify(f"The answer has {len(blocks)} code blocks: give a number up to that.")
        else:
            put_in_clipboard(self._app, blocks[at] if blocks else "", "code block")

    def next_code(self, message: StoredMessage) -> None:
        """Copy the message's last code block; repeated, the previous one."""
        blocks = code_blocks(message.text)
        times = self._copied[1] + 1 if self._copied[0] == message.id else 0
        self._copied = message.id, times
        at = len(blocks) - 1 - times % max(1, len(blocks))
        what = f"code block {at + 1} of {len(blocks)}" if blocks else "code block"
        put_in_clipboard(self._app, blocks[at] if blocks else "", what)

    def selection(self) -> bool:
        """Copy the selected text. False if nothing is selected."""
        selected = self._app.screen.get_selected_text()
        if not selected:
            return False
        self._app.screen.clear_selection()
        put_in_clipboard(self._app, selected, "selection")
        return True

"""What the reader copies: an answer, a block of code, a message, what is selected."""

from __future__ import annotations

from textual.app import App

from tui.actions.clipboard import put_in_clipboard
from tui.chat.messages import ChatMessage
from tui.paint.markdown import code_blocks


class Copying:
    """Says what it has copied, and where there is nothing to copy."""

    def __init__(self, app: App[None]) -> None:
        self._app = app
        self._copied = (0, 0)  # the message, and how often one of its blocks was copied

    def message(self, message: ChatMessage) -> None:
        put_in_clipboard(self._app, message.text, "the message")

    def answer(self, answer: ChatMessage | None) -> None:
        put_in_clipboard(self._app, "" if answer is None else answer.text, "the answer")

    def code(self, answer: ChatMessage | None, number: str) -> None:
        """The last block of code, or the one with this number."""
        blocks = [] if answer is None else code_blocks(answer.text)
        at = int(number) - 1 if number.isdecimal() else len(blocks) - 1
        if number and not (number.isdecimal() and 0 <= at < len(blocks)):
            self._app.notify(
                f"The answer has {len(blocks)} blocks of code; name one.", markup=False
            )
        else:
            put_in_clipboard(self._app, blocks[at] if blocks else "", "the code")

    def next_code(self, message: ChatMessage) -> None:
        """The last block of the message; each time it is asked for again, the one before."""
        blocks = code_blocks(message.text)
        times = self._copied[1] + 1 if self._copied[0] == message.id else 0
        self._copied = message.id, times
        at = len(blocks) - 1 - times % max(1, len(blocks))
        what = f"code block {at + 1} of {len(blocks)}" if blocks else "code"
        put_in_clipboard(self._app, blocks[at] if blocks else "", what)

    def selection(self) -> bool:
        """Whether there was one."""
        selected = self._app.screen.get_selected_text()
        if not selected:
            return False
        self._app.screen.clear_selection()
        put_in_clipboard(self._app, selected, "the selection")
        return True

"""The dialog for a chat's system prompt."""

from __future__ import annotations

from textual import on
from textual.app import ComposeResult
from textual.events import Key, Paste
from textual.message import Message
from textual.widgets import TextArea

from mlxserve.system.terminal_text import clean
from tui.widgets.composer import NEW_LINE_KEYS
from tui.widgets.dialog import Dialog


class SystemText(TextArea):
    """The prompt's editor: Enter saves, as it sends in the composer."""

    class Saved(Message):
        """The user pressed Enter."""

    async def _on_paste(self, event: Paste) -> None:
        await super()._on_paste(Paste(clean(event.text)))
        event.stop()
        event.prevent_default()

    async def _on_key(self, event: Key) -> None:
        if event.key != "enter" and event.key not in (*NEW_LINE_KEYS, "ctrl+u"):
            return
        event.stop()
        event.prevent_default()
        if event.key == "enter":
            self.post_message(self.Saved())
        elif event.key == "ctrl+u":
            self.clear()
        else:
            self.insert("\n")


class SystemDialog(Dialog[str | None]):
    """Returns the new system prompt, empty for none; None leaves it unchanged."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self._text = clean(text)

    def compose(self) -> ComposeResult:
        keys = "Enter saves · Ctrl+J new line · Ctrl+U empties · Esc cancels"
        with self.box("System prompt of this chat", keys):
            yield SystemText(
                self._text,
                placeholder="What the model is told before the chat, such as: Answer in one sentence.",
                highlight_cursor_line=False,
                show_line_numbers=False,
            )

    def on_mount(self) -> None:
        field = self.query_one(SystemText)
        field.cursor_blink = False
        field.focus()
        field.move_cursor(field.document.end)

    @on(SystemText.Saved)
    def _save(self) -> None:
        self.dismiss(self.query_one(SystemText).text.strip())

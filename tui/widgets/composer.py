"""The line the reader writes in: Enter sends, history on the arrows, commands after a slash."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.events import Key, Paste
from textual.message import Message as Event
from textual.widgets import TextArea

from tui.opening import PLACEHOLDER
from tui.sanitise import clean

_NEW_LINE_KEYS = ("shift+enter", "ctrl+j", "alt+enter")


class Composer(TextArea):
    """Several lines of plain text."""

    MESSAGE_HINT = "E edit · R ask again · Y copy · ←→ versions · Esc back"
    EDIT_HINT = "Enter asks again · Esc leaves the first version as it is"

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("pageup", "app.scroll_transcript(-1)", "Scroll up", show=False),
        Binding("pagedown", "app.scroll_transcript(1)", "Scroll down", show=False),
    ]

    class Sent(Event):
        """The reader pressed Enter on something."""

        def __init__(self, text: str) -> None:
            super().__init__()
            self.text = text

    class Suggest(Event):
        """A key for the list of commands, while it is open: up, down, tab, enter, escape."""

        def __init__(self, key: str) -> None:
            super().__init__()
            self.key = key

    def __init__(self) -> None:
        super().__init__(
            placeholder=PLACEHOLDER,
            highlight_cursor_line=False,
            id="composer",
            show_line_numbers=False,
        )
        self.has_suggestions = False
        self._history: list[str] = []
        self._at: int | None = None  # where in the history; None: what is being written
        self._draft = ""

    def use_history(self, questions: Sequence[str]) -> None:
        """What was asked before, the oldest first."""
        self._history = list(questions)
        self._at = None

    def remember(self, text: str) -> None:
        """What was just asked."""
        self._history = [*(q for q in self._history if q != text), text]
        self._at = None

    def write(self, text: str) -> None:
        """Put a text in, with the cursor at its end."""
        self.load_text(clean(text))
        self.move_cursor(self.document.end)

    @property
    def before_cursor(self) -> str:
        """The text up to where the next character goes."""
        return self.get_text_range((0, 0), self.cursor_location)

    def complete(self, path: str) -> None:
        """Put the path in place of what is there of it; a folder waits for more."""
        row, column = self.cursor_location
        start = self.before_cursor.rpartition("@")[2]
        end = "" if path.endswith("/") else " "
        self.replace(clean(path) + end, (row, column - len(start)), (row, column))

    def action_copy(self) -> None:
        """Ctrl+C copies what is selected; with nothing selected it is the app's."""
        if self.selected_text:
            super().action_copy()
        else:
            self.app.action_help_quit()

    async def _on_paste(self, event: Paste) -> None:
        """What is pasted is shown, so it is cleaned like everything that is."""
        await super()._on_paste(Paste(clean(event.text)))
        self._take(event)

    async def _on_key(self, event: Key) -> None:
        """Keys of our own; for the others TextArea's handler is called after this one."""
        if self.has_suggestions and event.key in ("up", "down", "tab", "enter", "escape"):
            self._take(event)
            self.post_message(self.Suggest(event.key))
        elif event.key == "enter":
            self._take(event)
            self._send()
        elif event.key in _NEW_LINE_KEYS:
            self._take(event)
            self.insert("\n")
        elif (event.key == "up" and self.cursor_at_first_line and self._recall(-1)) or (
            event.key == "down" and self.cursor_at_last_line and self._recall(1)
        ):
            self._take(event)

    def _take(self, event: Key | Paste) -> None:
        event.stop()
        event.prevent_default()

    def _send(self) -> None:
        text = clean(self.text).strip("\n")
        if text.strip():
            self.load_text("")
            self._at = None
            self.post_message(self.Sent(text))

    def _recall(self, step: int) -> bool:
        """Go through the history; False where it ends."""
        at = (len(self._history) if self._at is None else self._at) + step
        if (self._at is None and step > 0) or at < 0:
            return False
        if self._at is None:
            self._draft = self.text
        if at >= len(self._history):
            self._at = None
            self.write(self._draft)
        else:
            self._at = at
            self.write(self._history[at])
        return True

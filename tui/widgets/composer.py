"""The input: Enter sends, the arrow keys recall the history, a slash starts a command."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.events import Key, Paste
from textual.message import Message as Event
from textual.widgets import TextArea

from mlxserve.system.terminal_text import clean
from tui.chat.mentions import mention, pasted_picture
from tui.chat.pasted import Pastes
from tui.opening import PLACEHOLDER

NEW_LINE_KEYS = ("shift+enter", "ctrl+j", "alt+enter")
# The cursor stops blinking this long after the last key, or up to twice as long. Blinking is most of the work
# of an idle chat, and it distracts people who read.
BLINK_SECONDS = 10.0


class Composer(TextArea):
    """Several lines of plain text. A long paste is shown as a mark, and sent whole."""

    MESSAGE_HINT = "E edit · R regenerate · Y copy · ←→ versions · Esc back"
    EDIT_HINT = "Enter resends · Esc cancels the edit"

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("pageup", "app.scroll_transcript(-1)", "Scroll up", show=False),
        Binding("pagedown", "app.scroll_transcript(1)", "Scroll down", show=False),
        Binding("ctrl+end", "app.scroll_to_end", "Go to the end", show=False),
    ]

    @dataclass
    class Sent(Event):
        """The user pressed Enter with a text."""

        text: str

    class SentNothing(Event):
        """The user pressed Enter without a text."""

    class WantsBelow(Event):
        """The user pressed Down without a text, at the end of the history."""

    @dataclass
    class Suggest(Event):
        """A key for the open list of suggestions: up, down, tab, enter, escape."""

        key: str

    def __init__(self) -> None:
        super().__init__(
            placeholder=PLACEHOLDER,
            highlight_cursor_line=False,
            id="composer",
            show_line_numbers=False,
        )
        self.has_suggestions = False
        self._history: list[str] = []
        self._at: int | None = None  # index into the history; None: the draft
        self._draft = ""
        self._pastes = Pastes()

    def on_mount(self) -> None:
        self._still = self.set_interval(BLINK_SECONDS, self._stop_blinking)

    def on_focus(self) -> None:
        self._blink()

    def _blink(self) -> None:
        if self.is_mounted:
            self._still.reset()
            self.cursor_blink = True

    def _stop_blinking(self) -> None:
        self.cursor_blink = False

    def use_history(self, questions: Sequence[str]) -> None:
        """Set the history: earlier questions, oldest first."""
        self._history = list(questions)
        self._at = None

    def remember(self, text: str) -> None:
        """Add a question to the history."""
        self._history = [*(q for q in self._history if q != text), text]
        self._at = None

    def write(self, text: str) -> None:
        """Replace the text, with the cursor at its end. Earlier pastes in it are folded."""
        self.load_text(self._pastes.folded(clean(text)))
        self.move_cursor(self.document.end)

    @property
    def whole_text(self) -> str:
        """The text to send, with long pastes unfolded."""
        return self._pastes.unfolded(self.text)

    @property
    def before_cursor(self) -> str:
        """The text before the cursor."""
        return self.get_text_range((0, 0), self.cursor_location)

    def complete(self, path: str) -> None:
        """Replace the typed start of a path by the path, plus a space unless it is a folder."""
        row, column = self.cursor_location
        start = self.before_cursor.rpartition("@")[2]
        end = "" if path.endswith("/") else " "
        self.replace(clean(path) + end, (row, column - len(start)), (row, column))

    def action_copy(self) -> None:
        """Ctrl+C copies the selection; without one the app handles it."""
        if self.selected_text:
            super().action_copy()
        else:
            self.app.action_help_quit()

    async def _on_paste(self, event: Paste) -> None:
        """Insert a pasted text, cleaned for the screen; a long one is folded.

        The path of a picture attaches it.
        """
        self._blink()
        picture = pasted_picture(event.text)
        text = self._pastes.fold(clean(event.text)) if picture is None else f"{mention(picture)} "
        await super()._on_paste(Paste(text))
        self._consume(event)

    def _show_pastes(self) -> None:
        """Toggle between folded and unfolded pastes."""
        whole = self.whole_text
        text = whole if whole != self.text else self._pastes.folded(whole)
        if text != self.text:
            self.replace(text, (0, 0), self.document.end)

    def _delete_mark(self, key: str) -> bool:
        """Delete a folded paste next to the cursor as one character; False if there is none."""
        row, column = self.cursor_location
        line = self.document.get_line(row)
        if self.selected_text:
            return False
        if key == "backspace":
            first, last = column - len(self._pastes.mark_before(line[:column])), column
        else:
            first, last = column, column + len(self._pastes.mark_after(line[column:]))
        if first < last:
            self.delete((row, first), (row, last))
        return first < last

    async def _on_key(self, event: Key) -> None:
        """Handles the composer's keys; for all others TextArea's handler is called after this one."""
        self._blink()
        if self.has_suggestions and event.key in ("up", "down", "tab", "enter", "escape"):
            self._consume(event)
            self.post_message(self.Suggest(event.key))
        elif event.key == "enter":
            self._consume(event)
            self.send()
        elif event.key == "tab":
            # The last message: Textual would focus the first one.
            self._consume(event)
            await self.app.run_action("app.focus_message(-1)")
        elif event.key in NEW_LINE_KEYS:
            self._consume(event)
            self.insert("\n")
        elif event.key == "ctrl+u":
            self._consume(event)
            # An edit: Ctrl+Z brings the text back.
            self.clear()
        elif event.key == "f6":
            self._consume(event)
            self._show_pastes()
        elif (
            (event.key in ("backspace", "delete") and self._delete_mark(event.key))
            or (event.key == "up" and self.cursor_at_first_line and self._recall(-1))
            or (event.key == "down" and self.cursor_at_last_line and self._recall(1))
        ):
            self._consume(event)
        elif event.key == "down" and not self.text:
            self._consume(event)
            self.post_message(self.WantsBelow())

    def _consume(self, event: Key | Paste) -> None:
        event.stop()
        event.prevent_default()

    def send(self) -> None:
        """Send the text, as Enter does."""
        text = clean(self.whole_text).strip("\n")
        if text.strip():
            self.load_text("")
            self._at = None
            self.post_message(self.Sent(text))
        else:
            self.post_message(self.SentNothing())

    def _recall(self, step: int) -> bool:
        """Move through the history; False at its ends."""
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

"""A question in the chat: its pictures and its text."""

from __future__ import annotations

from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.events import Click
from textual.strip import Strip

from mlxserve.history.messages import StoredMessage, Version
from mlxserve.system.terminal_text import one_line
from tui.paint.painter import Painter
from tui.paint.preview import preview
from tui.paint.theme import Palette
from tui.widgets.message import LONG_TEXT, MessageView

# A question of more lines is folded to its first ones.
_LONG_QUESTION, _SHOWN_LINES = 40, 12


class QuestionView(MessageView):
    """A question of the user: shown as typed, not as Markdown, and a long one folded."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("t,enter", "unfold", "Unfold")]

    def __init__(self, message: StoredMessage, version: Version, palette: Palette) -> None:
        super().__init__(message, version, palette)
        self._lines: list[Strip] = []
        self._is_open = False  # although it is long

    @property
    def num_lines(self) -> int:
        return len(self._lines)

    def line(self, y: int) -> Strip:
        return self._lines[y]

    def mark(self, words: str) -> None:
        # The words may be in the lines that are folded.
        if words and not self._is_open:
            self.action_unfold()
        super().mark(words)

    def action_unfold(self) -> None:
        """Show all lines of a long question, or fold it again."""
        self._is_open = not self._is_open
        if self._painted_width is not None:
            self.paint(self._painted_width, self._palette)
            self.lines_changed()

    def on_click(self, event: Click) -> None:
        if event.y == self.num_lines - 1 and self._is_long:
            self.action_unfold()

    @property
    def _is_long(self) -> bool:
        return self.message.text.count("\n") >= _LONG_QUESTION or len(self.message.text) > LONG_TEXT

    def _text_lines(self, painter: Painter) -> list[Strip]:
        text = self.message.text
        if not self._is_long or self._is_open:
            return list(painter.plain(text))
        shown = list(painter.plain("\n".join(text[:LONG_TEXT].split("\n")[:_SHOWN_LINES])))
        num_lines = text.count("\n") + 1
        words = f"… {num_lines:,} lines, {len(text):,} characters · Tab, then t shows all"
        return [*shown[:_SHOWN_LINES], *painter.plain(words, self._palette.marker)]

    def paint(self, width: int, palette: Palette) -> None:
        painter = Painter(width, palette)
        self._lines = []
        for picture in self.message.images:
            name = painter.plain(f"[{one_line(picture.name, 60)}]", palette.marker)
            shown = () if picture.is_document else preview(picture.content, width)
            self._lines += [*shown, *name]
        self._lines += [*self._text_lines(painter), *self._ending(painter)]

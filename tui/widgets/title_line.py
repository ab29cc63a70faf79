"""The first line: the chat's title at the left, the model and its context at the right."""

from __future__ import annotations

from collections.abc import Sequence

from textual.app import ComposeResult
from textual.containers import Horizontal
from textual.content import Content
from textual.widgets import Static

from tui.opening import TITLE

_GAP = 2  # columns between both
_MIN_TITLE = 20  # columns that a longer title keeps
_SEPARATOR = Content(" · ")


class TitleLine(Horizontal):
    """Omits whole parts from the end in a narrow window, but never the first."""

    def __init__(self) -> None:
        super().__init__(id="header")
        self._title = TITLE
        self._parts: Sequence[Content] = ()

    def compose(self) -> ComposeResult:
        yield Static(self._title, id="title", markup=False)
        yield Static(id="facts", markup=False)

    def show_title(self, title: str) -> None:
        self._title = title
        self.query_one("#title", Static).update(Content(title))
        self._fit()

    def show_parts(self, parts: Sequence[Content]) -> None:
        """Show the parts, most important first."""
        self._parts = parts
        self._fit()

    def on_resize(self) -> None:
        self._fit()

    def _fit(self) -> None:
        least = min(Content(self._title).cell_length, _MIN_TITLE) + _GAP
        facts = fitting(self._parts, max(0, self.content_size.width - least))
        self.query_one("#facts", Static).update(facts)


def fitting(parts: Sequence[Content], room: int) -> Content:
    """Return as many leading parts as fit in `room` columns; the first one is cut if needed."""
    for count in range(len(parts), 1, -1):
        line = _SEPARATOR.join(parts[:count])
        if line.cell_length <= room:
            return line
    return parts[0].truncate(room, ellipsis=True) if parts else Content("")

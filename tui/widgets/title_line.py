"""The first line: the chat's title at the left, the model and what is known of it at the right."""

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
    """Leaves out parts from the end where the window is narrow, whole ones, and the first never."""

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
        """The most important one first."""
        self._parts = parts
        self._fit()

    def on_resize(self) -> None:
        self._fit()

    def _fit(self) -> None:
        least = min(Content(self._title).cell_length, _MIN_TITLE) + _GAP
        facts = fitting(self._parts, max(0, self.content_size.width - least))
        self.query_one("#facts", Static).update(facts)


def fitting(parts: Sequence[Content], room: int) -> Content:
    """As many of the first parts as `room` columns hold; the first one is cut if it has to be."""
    for count in range(len(parts), 1, -1):
        line = _SEPARATOR.join(parts[:count])
        if line.cell_length <= room:
            return line
    return parts[0].truncate(room, ellipsis=True) if parts else Content("")

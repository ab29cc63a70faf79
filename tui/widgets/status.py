"""The last line: what is going on at the left, the figures of the answer at the right."""

from __future__ import annotations

from collections.abc import Sequence

from textual.app import ComposeResult
from textual.containers import Container, Horizontal
from textual.content import Content
from textual.widget import Widget
from textual.widgets import Static

from tui.opening import STARTING

_BAR_WIDTH = 8


class FittingLine(Widget):
    """The longest of some lines that fits; nothing where none does."""

    def __init__(self, *, id: str) -> None:  # noqa: A002 (Textual's name for it)
        super().__init__(id=id)
        self._lines: Sequence[str] = ()

    def show(self, lines: Sequence[str]) -> None:
        self._lines = lines
        self.refresh()

    def on_resize(self) -> None:
        self.refresh()

    @property
    def words(self) -> str:
        room = self.content_size.width
        return next((line for line in self._lines if len(line) <= room), "")

    def render(self) -> Content:
        return Content(self.words)


class StatusLine(Container):
    """Two texts; the right one gives way when there is no room for both."""

    def compose(self) -> ComposeResult:
        with Horizontal():
            yield Static(STARTING, id="doing")
            yield FittingLine(id="stats")

    def say(self, words: str, *, style: str = "", progress: float | None = None) -> None:
        """What is going on."""
        bar = "" if progress is None else f"  {_bar(progress)} {progress:.0%}"
        self.query_one("#doing", Static).update(Content.assemble((words + bar, style)))

    def show_stats(self, lines: Sequence[str]) -> None:
        """The same in more and in fewer words, the longest first."""
        self.query_one(FittingLine).show(lines)

    @property
    def words(self) -> str:
        """Both texts, as they are on the screen."""
        return f"{self.query_one('#doing', Static).content} {self.query_one(FittingLine).words}"


def _bar(progress: float) -> str:
    full = round(_BAR_WIDTH * min(1.0, max(0.0, progress)))
    return "━" * full + "┄" * (_BAR_WIDTH - full)

"""The last line: the current activity at the left, the answer's statistics at the right."""

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
    """Shows the longest of several lines that fits, or nothing."""

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
    """Two texts; without room for both, the right one is shortened."""

    def compose(self) -> ComposeResult:
        with Horizontal():
            yield Static(STARTING, id="activity")
            yield FittingLine(id="stats")

    def say(self, words: str, *, style: str = "", progress: float | None = None) -> None:
        """Show the current activity."""
        bar = "" if progress is None else f"  {_bar(progress)} {progress:.0%}"
        self.query_one("#activity", Static).update(Content.assemble((words + bar, style)))

    def show_stats(self, lines: Sequence[str]) -> None:
        """Show one of these alternatives, given longest first."""
        self.query_one(FittingLine).show(lines)

    @property
    def words(self) -> str:
        """Both texts, as shown."""
        return f"{self.query_one('#activity', Static).content} {self.query_one(FittingLine).words}"


def _bar(progress: float) -> str:
    full = round(_BAR_WIDTH * min(1.0, max(0.0, progress)))
    return "━" * full + "┄" * (_BAR_WIDTH - full)

"""The last line: what is going on at the left, the figures of the answer at the right."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.containers import Container, Horizontal
from textual.content import Content
from textual.widgets import Static

from tui.opening import STARTING

_BAR_WIDTH = 8


class StatusLine(Container):
    """Two texts; the right one gives way when there is no room for both."""

    def compose(self) -> ComposeResult:
        with Horizontal():
            yield Static(STARTING, id="doing")
            yield Static(id="figures")

    def say(self, words: str, *, style: str = "", progress: float | None = None) -> None:
        """What is going on."""
        bar = "" if progress is None else f"  {_bar(progress)} {progress:.0%}"
        self.query_one("#doing", Static).update(Content.assemble((words + bar, style)))

    def show_figures(self, words: str) -> None:
        self.query_one("#figures", Static).update(Content(words))

    @property
    def words(self) -> str:
        """Both texts, as they are on the screen."""
        return " ".join(str(part.content) for part in self.query(Static))


def _bar(progress: float) -> str:
    full = round(_BAR_WIDTH * min(1.0, max(0.0, progress)))
    return "━" * full + "┄" * (_BAR_WIDTH - full)

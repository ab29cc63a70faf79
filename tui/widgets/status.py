"""StatusLine: the current activity at the left, the answer's statistics at the right.

A message takes their place for some seconds, instead of toasts that cover the chat.
"""

from __future__ import annotations

from collections.abc import Sequence

from textual.app import ComposeResult
from textual.containers import Container, Horizontal
from textual.content import Content
from textual.timer import Timer
from textual.widget import Widget
from textual.widgets import Static

from mlxserve.system.terminal_text import clean
from tui.chat.stats_text import bar
from tui.opening import STARTING

_BAR_WIDTH = 8
# A message stays for as long as reading it takes, at this speed, but at least some seconds.
MIN_SECONDS, _CHARACTERS_PER_SECOND = 5.0, 15
_COLOURS = {"information": "$foreground", "warning": "$warning", "error": "$error"}


class FittingLine(Widget):
    """Shows the longest of several lines that fits, or nothing."""

    def __init__(self, *, id: str) -> None:  # noqa: A002 (Textual's name for it)
        super().__init__(id=id)
        self._lines: Sequence[str] = ()

    def show(self, lines: Sequence[str]) -> None:
        before, self._lines = self.words, lines
        if self.words != before:
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
    """Two texts; the right one is shortened if both do not fit."""

    def __init__(self) -> None:
        super().__init__()
        self._activity = Content(STARTING)
        self._messages: list[Content] = []
        self._is_new_cause = True
        self._timer: Timer | None = None  # until the messages go

    def compose(self) -> ComposeResult:
        with Horizontal():
            yield Static(STARTING, id="activity")
            yield FittingLine(id="stats")
        yield Static(id="message", markup=False)

    def say(self, words: str, *, style: str = "", progress: float | None = None) -> None:
        """Show the current activity."""
        done = "" if progress is None else f"  {bar(progress, _BAR_WIDTH)} {progress:.0%}"
        self._activity = Content.assemble((words + done, style))
        self.query_one("#activity", Static).update(self._activity)

    def tell(self, words: str, severity: str = "information", seconds: float | None = None) -> None:
        """Show a message instead of everything else.

        It goes below the one before, if that has the same cause.

        seconds: duration; by default as long as reading it takes
        """
        message = Content.styled(clean(words), _COLOURS[severity])
        before = (
            []
            if self._is_new_cause
            else [earlier for earlier in self._messages if earlier != message]
        )
        self._messages, self._is_new_cause = [*before[-1:], message], False
        self.query_one("#message", Static).update(Content("\n").join(self._messages))
        self.set_class(True, "-message")
        if self._timer is not None:
            self._timer.stop()
        length = sum(len(message) for message in self._messages)
        reading = max(MIN_SECONDS, length / _CHARACTERS_PER_SECOND)
        self._timer = self.set_timer(seconds or reading, self.end_message)

    def begin_cause(self) -> None:
        """Mark an action of the user: the next message replaces all before."""
        self._is_new_cause = True

    def end_message(self) -> None:
        """Show the activity again."""
        self._messages = []
        self.set_class(False, "-message")

    def show_stats(self, lines: Sequence[str]) -> None:
        """Show one of these alternatives, given longest first."""
        self.query_one(FittingLine).show(lines)

    @property
    def words(self) -> str:
        """Both texts, as shown without a message."""
        return f"{self._activity} {self.query_one(FittingLine).words}"

"""RoundLines: the lines of an answer's rounds, in which the model called tools.

I will look.                                       the text, as Markdown
▸ git__git_log {"max_count": 1}  0.31 s            folded
▾ git__git_log {"max_count": 1}  0.31 s            opened: the tool's result
│ Commit history: ...
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.style import Style
from textual.strip import Strip

from mlxserve.history.calls import CallRecord, CallState, ToolRound
from mlxserve.system.terminal_text import one_line
from tui.chat.stats_text import format_seconds
from tui.paint.markdown import MarkdownStream
from tui.paint.painter import Painter, quoted

_MAX_ARGUMENTS = 300  # characters in the line of a call
_WORDS = {
    CallState.ASKED: "waits for you",
    CallState.RUNNING: "running …",
    CallState.FAILED: "failed",
    CallState.REFUSED: "not allowed",
    CallState.STOPPED: "stopped",
}


class RoundLines:
    """Paints each state of a round once."""

    def __init__(self) -> None:
        self.lines: list[Strip] = []
        self._painted: list[tuple[ToolRound, list[Strip]]] = []
        self._how: tuple[Painter, bool] | None = None

    def paint(
        self,
        rounds: Sequence[ToolRound],
        painter: Painter,
        *,
        is_open: bool,
        marker: Style,
        error: Style,
    ) -> None:
        """Paint changed rounds. `is_open`: with the thinking and the results."""
        if self._how != (painter, is_open):
            self._painted, self._how = [], (painter, is_open)
        known = [tool_round for tool_round, _ in self._painted]
        if known == list(rounds):
            return
        for at, tool_round in enumerate(rounds):
            if at < len(known) and known[at] == tool_round:
                continue
            lines = _lines(tool_round, painter, is_open=is_open, marker=marker, error=error)
            self._painted[at:] = [(tool_round, lines)]
        self.lines = [line for _, lines in self._painted for line in lines]


def _lines(
    tool_round: ToolRound, painter: Painter, *, is_open: bool, marker: Style, error: Style
) -> list[Strip]:
    narrow = Painter(painter.width - 2, painter.palette)
    lines: list[Strip] = []
    if is_open and tool_round.thinking.strip():
        lines += [quoted(line, marker) for line in narrow.plain(tool_round.thinking.strip())]
    if tool_round.text.strip():
        body = MarkdownStream.whole(tool_round.text, painter)
        lines += [body.line(y) for y in range(body.num_lines)]
        lines.append(Strip.blank(0))
    for call in tool_round.calls:
        style = error if call.state is CallState.FAILED else marker
        lines += painter.plain(_head(call, is_open=is_open), style)
        if is_open and call.result:
            lines += [quoted(line, marker) for line in narrow.plain(call.result)]
    lines.append(Strip.blank(0))
    return lines


def _head(call: CallRecord, *, is_open: bool) -> str:
    sign = "✗" if call.state is CallState.FAILED else "▾" if is_open else "▸"
    call_words = f"{sign} {one_line(call.name, 70)} {one_line(call.arguments, _MAX_ARGUMENTS)}"
    seconds = "" if call.seconds is None else format_seconds(call.seconds)
    parts = (call_words, _WORDS.get(call.state, ""), seconds)
    return " · ".join(part.strip() for part in parts if part)

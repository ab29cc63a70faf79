"""Messages on the screen, one widget each; every line of a message is a stored strip.

    question   the text as typed, and its version
    answer     ▸ time__now {} · 0.02 s    (calls of tools, after the text before them)
               ▸ Thought for 4 s          (not even parsed while closed)
               Markdown
               the error, if there was one
               how it ended, and its version

A widget per block would cost seconds in a long chat; a line costs nothing until it is visible.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import ClassVar

from rich.style import Style
from textual.binding import Binding, BindingType
from textual.events import Click
from textual.message import Message as Event
from textual.strip import Strip
from textual.worker import Worker

from mlxserve.history.calls import ToolRound
from mlxserve.history.messages import State, StoredMessage, Version
from tui.chat.live_answer import AnswerPhase, LiveAnswer
from tui.chat.progress import describe_waiting
from tui.chat.stats_text import ending_line, format_seconds
from tui.paint.markdown import MarkdownStream
from tui.paint.painter import LINK, Painter, quoted
from tui.paint.theme import Palette
from tui.widgets.round_lines import RoundLines
from tui.widgets.strips import StripView
from tui.workers import start_worker

SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
# A flush may take a fifth of the time: slow painting happens less often instead of lagging.
_FLUSH_REST = 4
# A longer text is painted in a thread: that takes some 10 ms per 4,000 characters. For the same
# reason, at most this much of an answer that arrives in larger pieces is painted at once.
LONG_TEXT = 8_000

_THOUGHTS, _BODY = 2, 4  # places among the sections of an answer

# A number of lines, and a function from the index of a line to the line.
Section = tuple[int, Callable[[int], Strip]]


class MessageAct(StrEnum):
    """The user's actions on a message."""

    EDIT = "edit"
    RETRY = "retry"
    COPY = "copy"
    COPY_CODE = "copy_code"


class MessageView(StripView, can_focus=True):
    """The base of questions and answers."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("e", "choose('edit')", "Edit"),
        Binding("r", "choose('retry')", "Regenerate"),
        Binding("left", "sibling(-1)", "Previous version"),
        Binding("right", "sibling(1)", "Next version"),
        Binding("y", "choose('copy')", "Copy"),
        Binding("c", "choose('copy_code')", "Copy code"),
        Binding("end,ctrl+end", "app.scroll_to_end", "Go to the end", show=False),
        Binding("up", "app.focus_message(-1)", "Up", show=False),
        Binding("down", "app.focus_message(1)", "Down", show=False),
    ]

    @dataclass
    class ActChosen(Event):
        """The user wants to act on this message."""

        message: StoredMessage
        act: MessageAct

    @dataclass
    class ShowVersion(Event):
        """The user wants to see another version of a message."""

        message_id: int

    def __init__(self, message: StoredMessage, version: Version, palette: Palette) -> None:
        super().__init__(palette, classes=message.role.value)
        self.message = message
        self.version = version

    def show(self, message: StoredMessage, version: Version) -> None:
        """Update the same message."""
        if (message, version) != (self.message, self.version):
            self.message, self.version = message, version
            self.use_palette(self._palette)

    def action_choose(self, act: str) -> None:
        self.post_message(self.ActChosen(self.message, MessageAct(act)))

    def action_sibling(self, step: int) -> None:
        message_id = self.version.neighbour(step)
        if message_id is not None:
            self.post_message(self.ShowVersion(message_id))

    async def painted(self) -> None:
        """Wait until every line is painted."""

    def _ending(self, painter: Painter) -> Sequence[Strip]:
        words = ending_line(self.message, self.version)
        return painter.plain(words, self._palette.marker) if words else ()


class AnswerView(MessageView):
    """An answer of the model, complete or running."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("t,enter", "thinking", "Thinking")]

    def __init__(self, message: StoredMessage, version: Version, palette: Palette) -> None:
        super().__init__(message, version, palette)
        self._painter = self._thoughts_painter = Painter(80, palette)
        self._answer: LiveAnswer | None = None  # while it is running
        self._body: MarkdownStream | None = None
        self._thoughts: MarkdownStream | None = None  # None: closed
        self._rounds = RoundLines()
        self._head: Sequence[Strip] = ()
        self._foot: Sequence[Strip] = ()
        self._are_results_open = False
        self._num_rounds = 0  # painted rounds of the running answer
        # Text that has arrived and is not painted yet.
        self._unpainted = ""
        self._painting: Worker[None] | None = None
        self._frame = 0
        self._next_flush = 0.0
        self._thinking_seconds = 0.0

    @property
    def num_lines(self) -> int:
        return sum(count for count, _ in self._sections())

    def line(self, y: int) -> Strip:
        for count, line in self._sections():
            if y < count:
                return line(y)
            y -= count
        raise IndexError(y)

    def _sections(self) -> Sequence[Section]:
        """Sections from top to bottom, with a gap only between two that have lines."""
        body = (0, _blank) if self._body is None else (self._body.num_lines, self._body.line)
        thoughts = 0 if self._thoughts is None else self._thoughts.num_lines
        has_head, has_body, has_foot = bool(self._head), bool(body[0]), bool(self._foot)
        return (
            (len(self._rounds.lines), self._rounds.lines.__getitem__),
            (len(self._head), self._head.__getitem__),
            (thoughts, self._thought),
            (int(has_head and (has_body or has_foot)), _blank),
            body,
            (int(has_body and has_foot), _blank),
            (len(self._foot), self._foot.__getitem__),
        )

    def _thought(self, y: int) -> Strip:
        assert self._thoughts is not None, "closed thinking has no lines"
        return quoted(self._thoughts.line(y), self._palette.marker)

    def paint(self, width: int, palette: Palette) -> None:
        self._painter = Painter(width, palette)
        self._thoughts_painter = Painter(width - 2, palette)
        if self._answer is None and len(self.message.text) > LONG_TEXT:
            self._body = self._at_a_glance()
        elif self._body is None:
            self._body = MarkdownStream.whole(self.message.text, self._painter)
        else:
            self._body.repaint(self._painter)
        if self._thoughts is not None:
            self._thoughts.repaint(self._thoughts_painter)
        self._frame_lines()

    def _at_a_glance(self) -> MarkdownStream:
        """Show the end of a long text until a thread has painted all of it."""
        stream = MarkdownStream(self._painter)
        stream.feed(self.message.text)
        stream.glance()
        self._painting = start_worker(
            self, partial(self._show_whole, stream, self._painter.twin(self.app.call_from_thread))
        )
        return stream

    async def _show_whole(self, stream: MarkdownStream, painter: Painter) -> None:
        painting = await asyncio.to_thread(stream.final_painting, painter)
        if stream is self._body:  # unchanged meanwhile
            stream.show_final(painting)
            self.lines_changed()

    async def painted(self) -> None:
        if self._painting is not None:
            await self._painting.wait()

    def show(self, message: StoredMessage, version: Version) -> None:
        if self._answer is None and message.text != self.message.text:
            self._body = None
        super().show(message, version)

    # While it is running

    def follow(self, answer: LiveAnswer) -> None:
        """Show this answer while it is running: call `tick` often and `finish` at the end."""
        self._answer = answer
        self._num_rounds = len(answer.rounds)
        self._body = MarkdownStream(self._painter)
        self._frame_lines()
        self.lines_changed()

    def tick(self) -> None:
        """Paint the text that has arrived since the last tick."""
        answer, body = self._answer, self._body
        if answer is None or body is None:
            return
        before, live = self._layout_of_parts, self._live_lines()
        self._frame += 1
        if answer.phase is AnswerPhase.THINKING:
            self._thinking_seconds = answer.seconds - (answer.stats.first_token_seconds or 0)
        started = time.monotonic()
        if started >= self._next_flush:
            self._begin_round(answer)
            new = answer.take()
            self._unpainted += new.text
            body.feed(self._unpainted[:LONG_TEXT])
            self._unpainted = self._unpainted[LONG_TEXT:]
            body.flush()
            if self._thoughts is not None:
                self._thoughts.feed(new.thinking)
                self._thoughts.flush()
            self._next_flush = started + (1 + _FLUSH_REST) * (time.monotonic() - started)
        self._frame_lines()
        if self._layout_of_parts != before:
            self.lines_changed()
        else:
            self.redraw(y for y, line in live.items() if self.line(y) != line)

    @property
    def _layout_of_parts(self) -> Sequence[int]:
        return [count for count, _ in self._sections()]

    def _live_lines(self) -> dict[int, Strip]:
        """Lines, by place, that the next pieces may change: all but frozen ones."""
        lines, start = dict[int, Strip](), 0
        for part, (count, line) in enumerate(self._sections()):
            stream = {_THOUGHTS: self._thoughts, _BODY: self._body}.get(part)
            frozen = 0 if stream is None else stream.num_frozen
            lines |= {start + y: line(y) for y in range(frozen, count)}
            start += count
        return lines

    def _begin_round(self, answer: LiveAnswer) -> None:
        """Start a round of calls: the text before them is painted with them from then on."""
        if len(answer.rounds) > self._num_rounds:
            self._num_rounds = len(answer.rounds)
            self._body, self._unpainted = MarkdownStream(self._painter), ""
            self._thoughts = (
                None if self._thoughts is None else MarkdownStream(self._thoughts_painter)
            )

    async def finish(self, message: StoredMessage) -> None:
        """Show the final painting of the complete message."""
        self._next_flush = 0.0
        self.tick()
        self._answer = None
        self.message = message
        if self._body is not None:
            self._body.feed(self._unpainted)
            self._unpainted = ""
        await self._paint_final()
        self._frame_lines()
        self.lines_changed()

    async def _paint_final(self) -> None:
        for stream, painter in (
            (self._body, self._painter),
            (self._thoughts, self._thoughts_painter),
        ):
            if stream is None:
                continue
            if len(stream.text) <= LONG_TEXT:
                stream.show_final(stream.final_painting(painter))
                continue
            twin = painter.twin(self.app.call_from_thread)
            painting = await asyncio.to_thread(stream.final_painting, twin)
            stream.show_final(painting)
            if painter not in (self._painter, self._thoughts_painter):
                # The window was resized meanwhile.
                self.paint(self._painter.width, self._palette)

    # Thinking

    @property
    def has_thinking(self) -> bool:
        return bool(self.message.thinking) if self._answer is None else self._answer.has_thinking

    @property
    def _all_rounds(self) -> Sequence[ToolRound]:
        return self.message.rounds if self._answer is None else self._answer.rounds

    def action_thinking(self) -> None:
        """Open or close the thinking and the results of tools."""
        is_open = self._are_results_open if self._all_rounds else self._thoughts is not None
        self.open_thinking(is_open=not is_open)

    def open_thinking(self, *, is_open: bool) -> None:
        self._are_results_open = is_open
        if is_open and self._thoughts is None and self.has_thinking:
            self._thoughts = self._paint_thinking()
        elif not is_open:
            self._thoughts = None
        self._frame_lines()
        self.lines_changed()

    def on_click(self, event: Click) -> None:
        if isinstance(address := event.style.meta.get(LINK), str):
            self.app.open_url(address)
            return
        is_on_head = event.y <= len(self._rounds.lines) - (not self.has_thinking)
        if event.get_content_offset(self) is not None and is_on_head:
            self.action_thinking()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        if action == "thinking":
            return self.has_thinking or bool(self._all_rounds)
        return super().check_action(action, parameters)

    def _paint_thinking(self) -> MarkdownStream:
        if self._answer is None:
            return MarkdownStream.whole(self.message.thinking, self._thoughts_painter)
        stream = MarkdownStream(self._thoughts_painter)
        stream.feed(self._answer.taken().thinking)
        stream.flush()
        return stream

    # The lines around the text

    def _frame_lines(self) -> None:
        self._rounds.paint(
            self._all_rounds,
            self._painter,
            is_open=self._are_results_open,
            marker=self._palette.marker,
            error=self._error_style,
        )
        self._head = self._thinking_lines()
        self._foot = self._foot_lines()

    def _thinking_lines(self) -> Sequence[Strip]:
        if not self.has_thinking:
            return ()
        is_thinking = self._answer is not None and self._answer.phase is AnswerPhase.THINKING
        words = "Thinking" if is_thinking else "Thought"
        if self._thinking_seconds:
            words += f" for {format_seconds(self._thinking_seconds)}"
        sign = "▸" if self._thoughts is None else "▾"
        return self._painter.plain(f"{sign} {words}", self._palette.marker)

    def _foot_lines(self) -> Sequence[Strip]:
        if self._answer is not None:
            return self._waiting_lines(self._answer)
        ending = self._ending(self._painter)
        if self.message.state is State.FAILED and self.message.error:
            error = self._painter.plain(f"✗ {self.message.error}", self._error_style)
            return (*error, *ending)
        return ending

    def _waiting_lines(self, answer: LiveAnswer) -> Sequence[Strip]:
        """Draw a spinner until the first piece arrives."""
        if answer.phase is not AnswerPhase.WAITING:
            return ()
        sign = SPINNER[self._frame // 2 % len(SPINNER)]
        words = f"{sign} {describe_waiting(answer.progress, answer.seconds)}"
        return self._painter.plain(words, self._palette.marker)

    @property
    def _error_style(self) -> Style:
        return Style(color=self.app.current_theme.error)


def _blank(_: int) -> Strip:
    return Strip.blank(0)

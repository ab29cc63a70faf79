import asyncio
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import replace
from typing import Self

import pytest
from rich.style import Style
from textual.app import App, ComposeResult
from textual.containers import VerticalScroll
from textual.geometry import Offset, Region
from textual.pilot import Pilot
from textual.selection import Selection

from mlxserve.history.calls import CallRecord, CallState, ToolRound
from mlxserve.history.messages import Role, State, StoredMessage, Version
from tui.chat.live_answer import LiveAnswer
from tui.paint import syntax
from tui.paint.markdown import MarkdownStream
from tui.paint.painter import Painter
from tui.paint.theme import DARK, Palette, palette
from tui.talk.pieces import Piece, TextPiece
from tui.widgets.message import LONG_TEXT, AnswerView, MessageView
from tui.widgets.question import QuestionView
from tui.widgets.transcript import view_of

ALONE = Version(0, (1,))
PALETTE = palette(dark=True)
BACKSLASH = "\\"


def message(role: Role, text: str, **more: object) -> StoredMessage:
    return StoredMessage(id=1, chat_id=1, parent_id=None, role=role, text=text, **more)  # type: ignore[arg-type]


class Wall(App[None]):
    """One message in a window."""

    def __init__(self, view: MessageView) -> None:
        super().__init__()
        self.register_theme(DARK)
        self.theme = DARK.name
        self.view = view

    def compose(self) -> ComposeResult:
        with VerticalScroll():
            yield self.view


def look(view: MessageView, story: Callable[[Pilot[None]], Awaitable[None]] | None = None) -> str:
    """Its lines in a window 40 wide, after the story."""

    async def run() -> str:
        async with Wall(view).run_test(size=(40, 20)) as pilot:
            await pilot.pause()
            if story is not None:
                await story(pilot)
            return "\n".join(view.line(y).text.rstrip() for y in range(view.num_lines))

    return asyncio.run(run())


def test_a_question_is_shown_as_typed() -> None:
    assert look(view_of(message(Role.USER, "# a\n*b*  c"), ALONE, PALETTE)) == "# a\n*b*  c"


def test_an_answer_is_markdown() -> None:
    assert look(view_of(message(Role.ASSISTANT, "# a\n*b*"), ALONE, PALETTE)) == "a\n\nb"


def test_the_ending_and_the_version_are_shown_below() -> None:
    stopped = message(Role.ASSISTANT, "half", state=State.STOPPED)
    shown = look(AnswerView(stopped, Version(0, (1, 2)), PALETTE))
    assert shown == "half\n\nstopped · ‹ version 1 of 2 ›"


def test_the_error_is_shown_below_the_text() -> None:
    failed = message(Role.ASSISTANT, "half", state=State.FAILED, error="It broke. Try again.")
    assert look(AnswerView(failed, ALONE, PALETTE)) == "half\n\n✗ It broke. Try again."


def test_a_long_answer_is_painted_in_a_thread_and_its_code_highlighted_in_the_main_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def spans(code: str, language: str, palette: Palette) -> list[tuple[Style, int, int]]:
        threads.append(threading.current_thread())
        return real(code, language, palette)

    threads: list[threading.Thread] = []
    real = syntax.spans
    monkeypatch.setattr(syntax, "spans", spans)
    text = f"{'word ' * (LONG_TEXT // 5)}\n```python\nx = 1\n```\n```bash\n$'{400 * BACKSLASH}\n```\nlast"
    view = view_of(message(Role.ASSISTANT, text), ALONE, PALETTE)
    assert isinstance(view, AnswerView)
    shown = look(view, lambda _pilot: view.painted())
    assert shown.endswith("last")
    assert "x = 1" in shown
    assert threads[-2:] == [threading.main_thread()] * 2
    syntax.slow_lexers.discard("bash")


def test_closed_thinking_is_not_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[str] = []
    whole = MarkdownStream.whole

    def recorded(text: str, painter: Painter) -> MarkdownStream:
        parsed.append(text)
        return whole(text, painter)

    monkeypatch.setattr(MarkdownStream, "whole", recorded)
    view = AnswerView(message(Role.ASSISTANT, "a", thinking="**deep**"), ALONE, PALETTE)
    assert look(view) == "▸ Thought\n\na"
    assert parsed == ["a"]


def test_thinking_opens_and_closes() -> None:
    async def open_it(pilot: Pilot[None]) -> None:
        view.action_thinking()

    view = AnswerView(message(Role.ASSISTANT, "a", thinking="**deep**"), ALONE, PALETTE)
    assert look(view, open_it) == "▾ Thought\n│ deep\n\na"


def test_a_new_width_wraps_the_text_again() -> None:
    async def narrow(pilot: Pilot[None]) -> None:
        await pilot.resize_terminal(14, 20)
        await pilot.pause()

    view = QuestionView(message(Role.USER, "four words in here"), ALONE, PALETTE)
    lines = look(view, narrow).splitlines()
    assert len(lines) > 1
    assert " ".join(line.strip() for line in lines) == "four words in here"


def test_a_long_question_is_folded_until_it_is_opened_or_searched() -> None:
    text = "\n".join(f"line {number}" for number in range(100))
    view = QuestionView(message(Role.USER, text), ALONE, PALETTE)

    async def unfold(pilot: Pilot[None]) -> None:
        view.focus()
        await pilot.press("t")

    folded = look(view).splitlines()
    assert [line.strip() for line in folded[:2]] == ["line 0", "line 1"]
    assert folded[11].strip() == "line 11"
    assert folded[12].strip().startswith("… 100 lines, 789")
    assert "line 12" not in folded
    view = QuestionView(message(Role.USER, text), ALONE, PALETTE)
    look(view, unfold)
    assert view.num_lines == 100
    view = QuestionView(message(Role.USER, text), ALONE, PALETTE)
    view.mark("line 99")
    look(view)
    assert view.num_lines == 100


class Redrawn(AnswerView):
    """Keeps what its ticks ask the screen to draw again."""

    def __init__(self, message: StoredMessage) -> None:
        self.redrawn: list[tuple[Region, ...]] = []
        self._is_ticking = False
        super().__init__(message, ALONE, PALETTE)

    def tick(self) -> None:
        self._is_ticking = True
        super().tick()
        self._is_ticking = False

    def refresh(self, *regions: Region, **how: bool) -> Self:
        if self._is_ticking:
            self.redrawn.append(regions)
        return super().refresh(*regions, **how)


def test_a_running_answer_redraws_only_the_lines_that_change() -> None:
    view = Redrawn(message(Role.ASSISTANT, ""))
    pieces = asyncio.Queue[Piece]()

    async def stream() -> AsyncGenerator[Piece, None]:
        while True:
            yield await pieces.get()

    async def save(_: StoredMessage) -> None:
        pass

    async def story(pilot: Pilot[None]) -> None:
        async def until_shown(words: str) -> None:
            while words not in view.line(view.num_lines - 1).text:
                await pilot.pause()
                view.tick()

        answer = LiveAnswer(view.message, stream(), save)
        reading = asyncio.create_task(answer.run())
        view.follow(answer)
        pieces.put_nowait(TextPiece("one two\n\nthree"))
        await until_shown("three")
        view.redrawn.clear()
        for _ in range(5):
            view.tick()
        assert view.redrawn == [], "nothing has changed"
        pieces.put_nowait(TextPiece(" four"))
        await until_shown("four")
        assert view.redrawn == [(Region(0, 2, view.size.width, 1),)]
        answer.stop()
        await reading

    look(view, story)


def test_a_selection_is_highlighted_and_returns_its_text() -> None:
    async def select(pilot: Pilot[None]) -> None:
        selection = Selection(Offset(5, 0), Offset(3, 2))
        pilot.app.screen.selections = {view: selection}
        assert view.get_selection(selection) == ("two\n\nthr", "\n")
        plain = view.line(0)
        marked = view.render_line(0)
        assert marked.text.startswith(plain.text)
        grounds = {s.style.bgcolor for s in marked if s.style and s.text.strip()}
        assert len(grounds) == 2, "a part of the line has another background"
        assert all(s.style.color != s.style.bgcolor for s in marked if s.style and s.text.strip())

    view = AnswerView(message(Role.ASSISTANT, "one, two\n\nthree"), ALONE, PALETTE)
    look(view, select)


def test_calls_of_tools_are_folded_until_they_are_opened() -> None:
    done = CallRecord(
        id="1", name="s__add", arguments="{}", state=CallState.DONE, result="42\x1b[2J", seconds=0.5
    )
    failed = replace(done, name="s__bad", state=CallState.FAILED, result="no luck", seconds=None)
    rounds = (ToolRound("*Look*:", "hm", (done, failed)),)
    view = view_of(message(Role.ASSISTANT, "It is 42.", rounds=rounds), ALONE, PALETTE)

    async def unfold(pilot: Pilot[None]) -> None:
        view.focus()
        await pilot.press("t")

    folded = "Look:\n\n▸ s__add {} · 0.50 s\n✗ s__bad {} · failed\n\nIt is 42."
    assert look(view) == folded
    again = view_of(view.message, ALONE, PALETTE)
    view = again
    assert look(again, unfold) == (
        "│ hm\nLook:\n\n▾ s__add {} · 0.50 s\n│ 42␛[2J\n✗ s__bad {} · failed\n│ no luck\n\nIt is 42."
    )

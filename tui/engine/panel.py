"""The engine panel: the last answer, the engine's statistics, and the cache page by page.

It polls the statistics only while it is on the screen, and less often while the engine is idle.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from rich.segment import Segment
from rich.style import Style
from textual import on
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.content import Content
from textual.message import Message
from textual.strip import Strip
from textual.widget import Widget
from textual.widgets import Static

from mlxserve.history.messages import AnswerStats
from tui.engine.page_map import FoldedMap
from tui.engine.page_watch import PageWatch, ignore_change
from tui.engine.panel_text import (
    NUM_OWNERS,
    PAGE_STATES,
    answer_lines,
    legend,
    now_lines,
    request_lines,
    window_legend,
)
from tui.talk.engine_state import EngineStats
from tui.talk.errors import ChatError, NoEngine
from tui.workers import start_worker

if TYPE_CHECKING:
    # Imports httpx, which takes longer than the first picture may.
    from tui.talk.engine_client import EngineClient

POLL_SECONDS = 0.5
QUIET_POLL_SECONDS = 2.0  # while nothing runs and no page changes
_RETRY_SECONDS = 2.0  # after a failure
STRIP = "strip"  # class of a panel that has a few rows only
HISTORY = 60  # polls that the sparklines show
_MAX_REQUESTS = 5
# Rows of the panel, beyond which requests are listed.
_NEEDED_HEIGHT = 26


@dataclass(frozen=True, slots=True)
class PanelInput:
    """The data of the panel at this moment."""

    engine: EngineClient | None  # None: not connected
    answer_stats: AnswerStats | None  # the last answer of the open chat
    request_id: str | None  # id of that answer


class PageGrid(Widget):
    """One sign per page, or per group of pages if there is less room."""

    COLOURS: ClassVar[dict[str, str]] = {
        **{f"page-{state}": colour for state, (_, colour, _) in PAGE_STATES.items()},
        **{f"owner-{number}": f"$owner-{number}" for number in range(NUM_OWNERS)},
    }
    COMPONENT_CLASSES: ClassVar[set[str]] = {*COLOURS}
    DEFAULT_CSS = "PageGrid { height: 1fr; }" + "".join(
        f"PageGrid .{name} {{ color: {colour}; }}" for name, colour in COLOURS.items()
    )

    class Resized(Message):
        """The room for signs has changed."""

    def __init__(self, *, classes: str = "") -> None:
        super().__init__(classes=classes)
        self._folded: FoldedMap | None = None

    def on_resize(self) -> None:
        self.post_message(self.Resized())

    @property
    def num_cells(self) -> int:
        return self.size.width * self.size.height

    def show(self, folded: FoldedMap | None) -> None:
        if folded != self._folded:
            self._folded = folded
            self.refresh()

    def render_line(self, y: int) -> Strip:
        width, folded = self.size.width, self._folded
        if folded is None:
            return Strip.blank(width, self.rich_style)
        styles = {s: self.get_component_rich_style(f"page-{s}", partial=True) for s in PAGE_STATES}
        owned = [
            self.get_component_rich_style(f"owner-{number}", partial=True)
            for number in range(NUM_OWNERS)
        ]
        own = Style(reverse=True)
        row = range(y * width, min((y + 1) * width, len(folded.cells)))
        segments = []
        for at in row:
            cell = folded.cells[at]
            has_owner = cell == "a" and at in folded.owners
            style = owned[folded.owners[at]] if has_owner else styles[cell]
            segments.append(
                Segment(PAGE_STATES[cell][0], style + own if at in folded.own else style)
            )
        strip = Strip(segments, len(row)).simplify()
        return strip.adjust_cell_length(width).apply_style(self.rich_style)


class EnginePanel(Vertical):
    """Shows what `panel_input` returns, and polls it for changes."""

    def __init__(self, panel_input: Callable[[], PanelInput], watch: PageWatch) -> None:
        super().__init__()
        self._panel_input = panel_input
        self._watch = watch
        # What was drawn last: finding and comparing the texts, and folding the map, take milliseconds.
        self._shown_answer: object = None
        self._drawn_map: object = None
        self._pages_changed = asyncio.Event()

    def compose(self) -> ComposeResult:
        self.border_title = "Engine"
        yield Static("Last answer", classes="heading", markup=False)
        yield Static(id="last-answer", markup=False)
        yield Static("Now", classes="heading", markup=False)
        yield Static(id="now", markup=False)
        yield Static(id="requests", markup=False)
        yield Static("Pages", classes="heading", id="pages-heading", markup=False)
        yield PageGrid()
        yield Static(id="legend", markup=False)
        yield Static("Pages of windows", classes="heading windows", markup=False)
        yield PageGrid(classes="windows")
        yield Static(id="window-legend", classes="windows", markup=False)

    def on_mount(self) -> None:
        self.show_missing("Not connected yet.")
        self.query_one("#requests").display = False
        self.set_interval(POLL_SECONDS, self.show_answer)
        self._watch.changed = self._show_change
        self._watch.ask_again()
        start_worker(self, self._follow, group="numbers")

    def on_unmount(self) -> None:
        if self._watch.changed == self._show_change:
            self._watch.changed = ignore_change

    def on_resize(self) -> None:
        self.show_answer()

    def show_answer(self) -> None:
        """Show the last answer's statistics. Also called by a timer: another chat may be open."""
        answer_stats, width = self._panel_input().answer_stats, self.content_size.width
        if (answer_stats, width) != self._shown_answer:
            self._shown_answer = answer_stats, width
            self._update("#last-answer", answer_lines(answer_stats, max(8, width)))
        self._show_pages()

    def show_missing(self, words: str) -> None:
        """Show why there are no statistics."""
        self._update("#now", Content.styled(words, "$text-quiet"))

    def _update(self, selector: str, words: Content) -> None:
        for static in self.query(selector).results(Static):
            if static.content != words:
                # A new layout of the whole screen takes longer than all else that the panel does.
                static.update(words, layout=_lengths(static.content) != _lengths(words))

    async def _follow(self) -> None:
        """Poll the connected server; start over with another one, or after a failure."""
        without: EngineClient | None = None  # a server without an engine is asked only once
        while True:
            engine = self._panel_input().engine
            if engine is None or engine is without:
                await asyncio.sleep(POLL_SECONDS)
                continue
            try:
                await self._follow_numbers(engine)
            except ChatError as error:
                if self._panel_input().engine is engine:
                    self.show_missing(str(error))
                without = engine if isinstance(error, NoEngine) else None
            await asyncio.sleep(_RETRY_SECONDS)

    async def _follow_numbers(self, engine: EngineClient) -> None:
        history: deque[EngineStats] = deque(maxlen=HISTORY)
        while self._panel_input().engine is engine:
            self._pages_changed.clear()
            stats = await engine.stats()
            is_quiet = bool(history) and stats == history[-1] and not stats.has_requests
            history.append(stats)
            width = self.content_size.width
            self._update("#now", now_lines(stats, tuple(history), width))
            own = self._panel_input().request_id
            max_requests = max(0, min(_MAX_REQUESTS, self.size.height - _NEEDED_HEIGHT))
            live = await engine.requests() if max_requests and stats.has_requests else []
            self._update(
                "#requests", request_lines(live, own, width, max_requests, self._watch.colour_of)
            )
            # None while the panel closes.
            for shown in self.query("#requests"):
                shown.display = bool(live) and not self.has_class(STRIP)
            history.extend([stats] * await self._until_next_poll(is_quiet))

    async def _until_next_poll(self, is_quiet: bool) -> int:
        """Wait; return the polls left out, so that each sparkline bar stands for the same time."""
        began = time.monotonic()
        await asyncio.sleep(POLL_SECONDS)
        if is_quiet:
            with suppress(TimeoutError):
                rest = QUIET_POLL_SECONDS - POLL_SECONDS
                await asyncio.wait_for(self._pages_changed.wait(), rest)
        return max(0, round((time.monotonic() - began) / POLL_SECONDS) - 1)

    def _show_change(self) -> None:
        self._pages_changed.set()
        self._show_pages()

    @on(PageGrid.Resized)
    def _show_pages(self) -> None:
        if not (grids := self.query(PageGrid)):
            # While the panel closes, its children are removed first.
            return
        pages, is_strip = self._watch.pages, self.has_class(STRIP)
        grid, of_windows = grids.first(), grids.last()
        request_id = self._panel_input().request_id
        rooms = grid.num_cells, of_windows.num_cells
        drawn = (pages, pages.num_applied, request_id, rooms, is_strip)
        if drawn == self._drawn_map:
            return
        self._drawn_map = drawn
        has_pages = pages.num_pages > 0
        self.query_one("#pages-heading").display = has_pages and not is_strip
        self.query_one("#legend").display = has_pages
        self.query(".windows").set(display=pages.num_window_pages > 0 and not is_strip)
        of_windows.show(pages.fold_windows(of_windows.num_cells))
        self._update("#window-legend", window_legend(pages))
        if not has_pages or not grid.num_cells:
            grid.show(None)
            return
        own = pages.pages_of(request_id)
        folded = pages.fold(grid.num_cells, own, self._watch.colour_of)
        grid.show(folded)
        self._update("#legend", legend(pages, len(own), folded))


def _lengths(content: object) -> list[int] | None:
    """Line lengths: texts with equal ones take the same room."""
    if not isinstance(content, Content):
        return None
    return [line.cell_length for line in content.split("\n")]

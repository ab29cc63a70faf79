"""The engine panel: the last answer, the engine in numbers, and the cache page by page.

It asks for the numbers for as long as it is on the screen, and no longer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from rich.segment import Segment
from rich.style import Style
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.content import Content
from textual.strip import Strip
from textual.widget import Widget
from textual.widgets import Static

from tui.chat.messages import AnswerStats
from tui.engine.page_map import FoldedMap
from tui.engine.page_watch import PageWatch, nobody_looks
from tui.engine.panel_text import GLYPHS, answer_lines, legend, now_lines
from tui.talk.errors import ChatError, NoEngine

if TYPE_CHECKING:
    from tui.talk.engine_client import (
        EngineClient,
    )  # with httpx, which the first picture has no time for

_LOOK_SECONDS = 0.5  # between two looks at the numbers
_AGAIN_SECONDS = 2.0  # until a server that did not answer is asked again


@dataclass(frozen=True, slots=True)
class PanelInput:
    """What the panel looks at, at this moment."""

    engine: EngineClient | None  # None: not connected
    answer_stats: AnswerStats | None  # of the last answer of the open chat
    request_id: str | None  # of that answer


class PageGrid(Widget):
    """A sign per page, or per so many pages when there is not enough room for all."""

    COMPONENT_CLASSES: ClassVar[set[str]] = {f"page-{state}" for state in GLYPHS}
    DEFAULT_CSS = """
    PageGrid {
        height: 1fr;
        .page-f { color: $text-quiet; }
        .page-c { color: $secondary; }
        .page-a { color: $success; }
        .page-s { color: $primary; }
        .page-p { color: $accent; }
    }
    """

    def __init__(self) -> None:
        super().__init__()
        self._folded: FoldedMap | None = None

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
        styles = {s: self.get_component_rich_style(f"page-{s}", partial=True) for s in GLYPHS}
        own = Style(reverse=True)
        row = range(y * width, min((y + 1) * width, len(folded.cells)))
        segments = [
            Segment(GLYPHS[cell], styles[cell] + own if at in folded.own else styles[cell])
            for at, cell in ((at, folded.cells[at]) for at in row)
        ]
        strip = Strip(segments, len(row)).simplify()
        return strip.adjust_cell_length(width).apply_style(self.rich_style)


class EnginePanel(Vertical):
    """Looks at what `watched` names; follows when that changes."""

    def __init__(self, watched: Callable[[], PanelInput], watch: PageWatch) -> None:
        super().__init__()
        self._watched = watched
        self._watch = watch

    def compose(self) -> ComposeResult:
        self.border_title = "Engine"
        yield Static("Last answer", classes="heading", markup=False)
        yield Static(id="last-answer", markup=False)
        yield Static("Now", classes="heading", markup=False)
        yield Static(id="now", markup=False)
        yield Static("Pages", classes="heading", id="pages-heading", markup=False)
        yield PageGrid()
        yield Static(id="legend", markup=False)

    def on_mount(self) -> None:
        self.show_missing("Not connected yet.")
        self.set_interval(_LOOK_SECONDS, self.show_answer)
        self._watch.changed = self._show_pages
        self._watch.ask_again()
        self.run_worker(self._follow(), group="numbers")

    def on_unmount(self) -> None:
        if self._watch.changed == self._show_pages:
            self._watch.changed = nobody_looks

    def on_resize(self) -> None:
        self.show_answer()
        self._show_pages()

    def show_answer(self) -> None:
        """What the last answer took; also on its own, because another chat may be open."""
        words = answer_lines(self._watched().answer_stats, max(8, self.content_size.width))
        self._update("#last-answer", words)
        self._show_pages()

    def show_missing(self, words: str) -> None:
        """Say why there is nothing to see."""
        self._update("#now", Content.styled(words, "$text-quiet"))

    def _update(self, selector: str, words: Content) -> None:
        for static in self.query(selector).results(Static):
            if static.content != words:
                static.update(words)

    async def _follow(self) -> None:
        """The server that is connected; begin again with another, or when it failed."""
        without: EngineClient | None = None  # a server that shows nothing is asked once
        while True:
            engine = self._watched().engine
            if engine is None or engine is without:
                await asyncio.sleep(_LOOK_SECONDS)
                continue
            try:
                await self._follow_numbers(engine)
            except ChatError as error:
                if self._watched().engine is engine:
                    self.show_missing(str(error))
                without = engine if isinstance(error, NoEngine) else None
            await asyncio.sleep(_AGAIN_SECONDS)

    async def _follow_numbers(self, engine: EngineClient) -> None:
        while self._watched().engine is engine:
            self._update("#now", now_lines(await engine.stats()))
            await asyncio.sleep(_LOOK_SECONDS)

    def _show_pages(self) -> None:
        if not (grids := self.query(PageGrid)):
            return  # while the panel is closed its parts go first
        pages = self._watch.pages
        grid, has_pages = grids.first(), pages.num_pages > 0
        self.query_one("#pages-heading").display = has_pages
        self.query_one("#legend").display = has_pages
        if not has_pages or not grid.num_cells:
            grid.show(None)
            return
        own = pages.pages_of(self._watched().request_id)
        folded = pages.fold(grid.num_cells, own)
        grid.show(folded)
        self._update("#legend", legend(pages, len(own), folded))

"""A widget made of finished lines: drawn line by line, selectable, cheap at any length."""

from __future__ import annotations

import re
from collections.abc import Iterable

from rich.style import Style
from rich.text import Text
from textual.geometry import Region, Size
from textual.selection import Selection
from textual.strip import Strip
from textual.widget import Widget

from tui.paint.theme import Palette


class StripView(Widget):
    """Base of line widgets: subclasses paint for a width and return lines by index."""

    DEFAULT_CSS = "StripView { width: 1fr; height: auto; }"

    def __init__(self, palette: Palette, *, classes: str | None = None) -> None:
        super().__init__(classes=classes)
        self._palette = palette
        self._painted_width: int | None = None
        self._shown_lines = 0
        self._marked: re.Pattern[str] | None = None

    def mark(self, words: str) -> None:
        """Highlight every occurrence of this text; empty: none."""
        self._marked = re.compile(re.escape(words), re.IGNORECASE) if words else None
        self.refresh()

    def paint(self, width: int, palette: Palette) -> None:
        """Paint every line for this width and these colours."""
        raise NotImplementedError

    @property
    def num_lines(self) -> int:
        raise NotImplementedError

    def line(self, y: int) -> Strip:
        raise NotImplementedError

    def use_palette(self, palette: Palette) -> None:
        """Repaint in another theme."""
        self._palette = palette
        if self._painted_width is not None:
            self.paint(self._painted_width, palette)
            self.lines_changed()

    def lines_changed(self) -> None:
        """Redraw the lines, with a new layout only if their number changed."""
        has_new_height = self.num_lines != self._shown_lines
        self._shown_lines = self.num_lines
        self.refresh(layout=has_new_height)

    def redraw(self, lines: Iterable[int]) -> None:
        """Redraw these lines of an unchanged number; each costs a terminal some 100 bytes."""
        for y in lines:
            self.refresh(Region(0, y, self.size.width, 1))

    def get_content_height(
        self,
        container: Size,  # noqa: ARG002 (the layout passes it)
        viewport: Size,  # noqa: ARG002
        width: int,
    ) -> int:
        if width != self._painted_width:
            self._painted_width = width
            self.paint(width, self._palette)
        self._shown_lines = self.num_lines
        return self._shown_lines

    def render_line(self, y: int) -> Strip:
        width = self.size.width
        if y >= self.num_lines:
            return Strip.blank(width, self.rich_style)
        strip = self._with_selection(self._with_marks(self.line(y)), y).apply_offsets(0, y)
        return strip.adjust_cell_length(width).apply_style(self.rich_style)

    def get_selection(self, selection: Selection) -> tuple[str, str] | None:
        text = "\n".join(self.line(y).text.rstrip() for y in range(self.num_lines))
        return selection.extract(text), "\n"

    def selection_updated(self, selection: Selection | None) -> None:  # noqa: ARG002
        self.refresh()

    def _with_selection(self, strip: Strip, y: int) -> Strip:
        selection = self.text_selection
        span = None if selection is None else selection.get_span(y)
        if span is None:
            return strip
        start, end = span
        # Its background alone: Textual gives the text the same colour, and it could not be read.
        style = Style(bgcolor=self.screen.get_component_rich_style("screen--selection").bgcolor)
        return self._restyled(strip, [(start, len(strip.text) if end == -1 else end)], style)

    def _with_marks(self, strip: Strip) -> Strip:
        if self._marked is None:
            return strip
        spans = [match.span() for match in self._marked.finditer(strip.text)]
        return self._restyled(strip, spans, self._palette.found) if spans else strip

    def _restyled(self, strip: Strip, spans: Iterable[tuple[int, int]], style: Style) -> Strip:
        text = Text.assemble(*[(s.text, s.style or "") for s in strip], end="")
        for start, end in spans:
            text.stylize(style, start, end)
        return Strip(text.render(self.app.console), strip.cell_length)

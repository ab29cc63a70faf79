"""Paints parsed Markdown: from the tokens of one top-level block to finished lines.

A line is a Textual Strip of at most `width` cells. Model text is only data: console markup is
never read, and text decoded from entities is cleaned again before it is shown.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal, Protocol, TypeVar

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.segment import Segment
from rich.style import Style
from rich.table import Table
from rich.text import Text
from textual.strip import Strip

from mlxserve.system.terminal_text import clean, one_line
from tui.paint.theme import Palette

if TYPE_CHECKING:
    from markdown_it.token import Token

T = TypeVar("T")

# Beyond this a block other than code is shown as plain text: inline parsing of one huge paragraph
# is superlinear, and its emphasis does not matter.
PLAIN_SIZE = 32_768
# Highlighting costs about 10 ms per 100 lines; beyond this many characters code stays plain.
HIGHLIGHT_SIZE = 50_000
# The key of a link's URL in the meta data of a style.
LINK = "link"
MIN_WIDTH = 8  # columns below which text is not indented further
BULLETS = ("•", "◦", "▪")
TASKS = {"[ ] ": "☐ ", "[x] ": "☑ ", "[X] ": "☑ "}


class InMain(Protocol):
    """Calls a function in the main thread and returns its result, as `App.call_from_thread` does."""

    def __call__(self, function: Callable[[], T], /) -> T: ...


@dataclass(frozen=True, slots=True)
class Frame:
    """The width and the list depth of an element."""

    width: int
    depth: int = 0  # depth of nested lists

    def inside(self, indent: int, *, deeper: bool = False) -> Frame:
        return Frame(self.width - indent, self.depth + deeper)

    def has_room(self, indent: int) -> bool:
        return self.width - indent >= MIN_WIDTH


class Painter:
    """Paints for one width and one palette. Use in one thread only."""

    def __init__(self, width: int, palette: Palette, in_main: InMain | None = None) -> None:
        """in_main: calls a function in the main thread, for a painter of another one."""
        self.width = max(MIN_WIDTH, width)
        self.palette = palette
        self._in_main = in_main
        self._console = Console(
            file=io.StringIO(), width=self.width, color_system="truecolor", legacy_windows=False
        )

    def twin(self, in_main: InMain) -> Painter:
        """An equal painter, for another thread."""
        return Painter(self.width, self.palette, in_main)

    def paint(
        self, tokens: Sequence[Token], *, continued: bool = False, first_number: int | None = None
    ) -> tuple[Strip, ...]:
        """Paint one block.

        continued: the block continues the one above (a piece of a long fence): no label
        first_number: overrides the first number of an ordered list
        """
        frame = Frame(self.width)
        if tokens and tokens[0].type in ("fence", "code_block"):
            return tuple(self._code(tokens[0], frame, has_label=not continued))
        return tuple(self._elements(tokens, frame, first_number=first_number))

    def plain(self, source: str, style: Style | None = None) -> tuple[Strip, ...]:
        """Paint the source as plain text, wrapped."""
        lines = self._wrap(Text(clean(source).rstrip("\n")), Frame(self.width))
        return tuple(lines if style is None else (line.apply_style(style) for line in lines))

    def _elements(
        self,
        tokens: Sequence[Token],
        frame: Frame,
        *,
        is_tight: bool = False,
        first_number: int | None = None,
    ) -> list[Strip]:
        lines: list[Strip] = []
        for element in top_level(tokens):
            painted = self._element(element, frame, first_number)
            if lines and painted and not is_tight:
                lines.append(Strip.blank(0))
            lines.extend(painted)
        return lines

    def _element(
        self, tokens: Sequence[Token], frame: Frame, first_number: int | None
    ) -> list[Strip]:
        first, inner = tokens[0], tokens[1:-1]
        match first.type:
            case "heading_open":
                return self._heading(first, inner, frame)
            case "paragraph_open":
                return self._wrap(self._inlines(inner, self.palette.text), frame)
            case "bullet_list_open" | "ordered_list_open":
                return self._list(first, inner, frame, first_number)
            case "blockquote_open":
                if not frame.has_room(2):
                    return self._elements(inner, frame)
                lines = self._elements(inner, frame.inside(2))
                bar = Segment("▌ ", self.palette.marker)
                return [_indent(line, bar) for line in lines]
            case "fence" | "code_block":
                return self._code(first, frame, has_label=True)
            case "table_open":
                return self._table(inner, frame)
            case "hr":
                return [Strip([Segment("─" * frame.width, self.palette.marker)], frame.width)]
            case _:
                return self._wrap(self._inlines([first], self.palette.text), frame)

    def _heading(self, first: Token, inner: Sequence[Token], frame: Frame) -> list[Strip]:
        style = self.palette.heading
        if first.tag == "h1":
            style += Style(underline=True)
        elif first.tag not in ("h2", "h3"):
            style = self.palette.strong
        return self._wrap(self._inlines(inner, style), frame)

    def _list(
        self, first: Token, inner: Sequence[Token], frame: Frame, first_number: int | None
    ) -> list[Strip]:
        items = list(top_level(inner))
        markers = _markers(first, len(items), frame.depth, first_number)
        indent = max((len(marker) for marker in markers), default=2)
        is_tight = _is_tight(inner)
        has_room = frame.has_room(indent)
        inside = frame.inside(indent if has_room else 0, deeper=True)
        lines: list[Strip] = []
        for marker, item in zip(markers, items, strict=True):
            body = self._elements(item[1:-1], inside, is_tight=is_tight) or [Strip.blank(0)]
            if lines and not is_tight:
                lines.append(Strip.blank(0))
            if not has_room:
                lines.extend([*self._wrap(Text(marker, self.palette.marker), frame), *body])
                continue
            lines.append(_indent(body[0], Segment(marker.rjust(indent), self.palette.marker)))
            lines.extend(_indent(line, Segment(" " * indent)) for line in body[1:])
        return lines

    def _code(self, token: Token, frame: Frame, *, has_label: bool) -> list[Strip]:
        language = one_line(token.info.split(maxsplit=1)[0], 40) if token.info.strip() else ""
        code = clean(token.content).expandtabs(4)
        text = self._highlight(code.removesuffix("\n"), language)
        inside = Frame(max(MIN_WIDTH, frame.width - 4))
        lines = self._wrap(text, inside, at_words=False)
        if language and has_label:
            label = Text(language, self.palette.code_label)
            lines = [*self._wrap(label, inside), *lines]
        pad = Segment("  ", self.palette.code)
        return [
            _indent(line, pad).adjust_cell_length(inside.width + 4, self.palette.code)
            for line in lines
        ]

    def _highlight(self, code: str, language: str) -> Text:
        text = Text(code, self.palette.code)
        if language and len(code) <= HIGHLIGHT_SIZE:
            from tui.paint.syntax import spans

            wanted = partial(spans, code, language, self.palette)
            for style, start, end in self._in_main(wanted) if self._in_main else wanted():
                text.stylize(style, start, end)
        return text

    def _table(self, inner: Sequence[Token], frame: Frame) -> list[Strip]:
        rows = [
            [self._inlines(cell[1:-1], self.palette.text) for cell in top_level(row[1:-1])]
            for part in top_level(inner)
            for row in top_level(part[1:-1])
        ]
        aligns = [_alignment(token) for token in inner if token.type == "th_open"]
        if 4 * len(aligns) > frame.width:
            return self._records(rows, frame)
        table = Table(
            box=box.SIMPLE_HEAD, border_style=self.palette.marker, header_style=self.palette.strong
        )
        for header, align in zip(rows[0], aligns, strict=True):
            table.add_column(header, justify=align, overflow="fold")
        for row in rows[1:]:
            table.add_row(*row)
        options = self._console.options.update(width=frame.width)
        lines = self._console.render_lines(table, options, pad=False)
        # The box adds an empty row above and below, and a margin of one cell at the left.
        return [Strip(line) for line in lines if "".join(s.text for s in line).strip()]

    def _records(self, rows: Sequence[Sequence[Text]], frame: Frame) -> list[Strip]:
        """Paint a table with more columns than fit, as one "header: value" line per cell."""
        lines: list[Strip] = []
        for row in rows[1:]:
            for header, cell in zip(rows[0], row, strict=False):
                lines.extend(self._wrap(Text.assemble(header, ": ", cell), frame))
            lines.append(Strip.blank(0))
        return lines[:-1]

    def _wrap(self, text: Text, frame: Frame, *, at_words: bool = True) -> list[Strip]:
        # Rich renders a text without spans without its own style, so the style becomes a span.
        text.stylize_before(text.style)
        if at_words:
            wrapped: Iterable[Text] = text.wrap(
                self._console, frame.width, tab_size=4, overflow="fold"
            )
        else:
            wrapped = _fold(text, frame.width)
        return [Strip(line.render(self._console)).simplify() for line in wrapped]

    def _inlines(self, tokens: Iterable[Token], style: Style) -> Text:
        text = Text(style=style)
        for token in tokens:
            if token.type == "inline" and token.children:
                self._append(text, token.children)
            elif token.content:
                text.append(clean(token.content))
        return text

    def _append(self, text: Text, children: Sequence[Token]) -> None:
        open_spans: list[tuple[int, Token]] = []
        for child in children:
            if child.nesting == 1:
                open_spans.append((len(text), child))
            elif child.nesting == -1 and open_spans:
                start, opened = open_spans.pop()
                self._close_span(text, start, opened)
            elif child.type in ("softbreak", "hardbreak"):
                text.append("\n")
            elif child.type == "code_inline":
                text.append(clean(child.content), self.palette.inline_code)
            elif child.type == "image":
                address = one_line(str(child.attrs.get("src", "")), 2000)
                text.append(f"[image: {clean(child.content)}]", self.palette.emphasis)
                text.append(f" {address}", self.palette.address)
            else:
                content = clean(child.content)
                if not len(text) and content[:4] in TASKS:
                    content = TASKS[content[:4]] + content[4:]
                text.append(content)

    def _close_span(self, text: Text, start: int, opened: Token) -> None:
        match opened.type:
            case "strong_open":
                text.stylize(self.palette.strong, start)
            case "em_open":
                text.stylize(self.palette.emphasis, start)
            case "s_open":
                text.stylize(self.palette.struck, start)
            case "link_open":
                address = one_line(str(opened.attrs.get("href", "")), 2000)
                shown = text.plain[start:]
                text.stylize(self.palette.link, start)
                if address.startswith(("http://", "https://")):
                    text.stylize(Style.from_meta({LINK: address}), start)
                # The target is always shown: a link's text may name a site other than its target.
                if address not in (shown, f"mailto:{shown}"):
                    text.append(f" ({address})", self.palette.address)


def top_level(tokens: Sequence[Token]) -> Iterator[Sequence[Token]]:
    """The elements of a token list: slices from an opening to its closing token."""
    start = depth = 0
    for at, token in enumerate(tokens):
        if depth == 0:
            start = at
        depth += token.nesting
        if depth == 0:
            yield tokens[start : at + 1]


def _is_tight(inner: Sequence[Token]) -> bool:
    """True if a list is tight: the parser then hides its paragraphs."""
    level = inner[0].level + 1 if inner else 0
    return all(t.hidden for t in inner if t.type == "paragraph_open" and t.level == level)


def _markers(first: Token, count: int, depth: int, first_number: int | None) -> list[str]:
    if first.type == "bullet_list_open":
        return [BULLETS[depth % len(BULLETS)] + " "] * count
    start = int(first.attrs.get("start", 1)) if first_number is None else first_number
    return [f"{start + at}{first.markup} " for at in range(count)]


def _alignment(token: Token) -> Literal["left", "center", "right"]:
    match token.attrs.get("style"):
        case "text-align:right":
            return "right"
        case "text-align:center":
            return "center"
        case _:
            return "left"


def quoted(line: Strip, style: Style) -> Strip:
    """Put a bar two cells wide before the line, both in this style."""
    return _indent(line.apply_style(style), Segment("│ ", style))


def _indent(line: Strip, prefix: Segment) -> Strip:
    return Strip([prefix, *line], prefix.cell_length + line.cell_length)


def _fold(text: Text, width: int) -> Iterator[Text]:
    """Cut lines at the width, anywhere, so that code keeps all its spaces."""
    for line in text.split("\n", allow_blank=True):
        if line.cell_len <= width:
            yield line
            continue
        cuts, cells = [], 0
        for at, character in enumerate(line.plain):
            size = cell_len(character)
            if cells + size > width:
                cuts.append(at)
                cells = 0
            cells += size
        yield from line.divide(cuts)

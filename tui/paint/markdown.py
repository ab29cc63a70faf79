"""MarkdownStream: paints Markdown that arrives in pieces, and finished blocks only once.

    text   [ block | block | block | open end ..... ]
             frozen: strips are kept   parsed and painted on every flush

A block is frozen, at a line end, once the next one has started, because later text cannot change it
any more. The open end is kept short: a long code fence or list is frozen in pieces, which may look
slightly different (a docstring across the cut, a loose list) until `show_final` replaces them by
the painting of the whole text. Only two things can change a frozen block: a link definition further
down, and such pieces. `show_final` handles both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from textual.strip import Strip

from mlxserve.system.terminal_text import clean
from tui.paint.painter import PLAIN_SIZE, Painter, top_level

if TYPE_CHECKING:
    from markdown_it import MarkdownIt
    from markdown_it.rules_inline import StateInline
    from markdown_it.token import Token

# Lines of an open fence or list that are repainted on each flush, which then takes some 10 ms.
MAX_OPEN_LINES = 40
# Beyond this size an open block that cannot be cut (a paragraph, a table) is shown unparsed.
MAX_OPEN_SIZE = 4_096
# The parser silently drops what is nested more deeply; such a block is shown as plain text.
_MAX_NESTING = 20
# Lines of a long fence that stay open, as context for the highlighter.
FENCE_CONTEXT = 6


@dataclass(frozen=True, slots=True)
class Block:
    """One top-level block, or a piece of one.

    continued: continues the block above
    first_number: the first number of a piece of an ordered list
    """

    source: str
    tokens: tuple[Token, ...] | None  # None: shown as plain text
    continued: bool = False
    first_number: int | None = None

    @property
    def kind(self) -> str:
        return self.tokens[0].type if self.tokens else ""

    @property
    def has_gap(self) -> bool:
        """True if an empty line separates it from the block above."""
        return not self.continued or self._is_loose

    @property
    def _is_loose(self) -> bool:
        return self.tokens is not None and any(
            t.type == "paragraph_open" and t.level == 2 and not t.hidden for t in self.tokens
        )

    def cut(self) -> int | None:
        """The line at which an open block can be cut in two, or None."""
        if self.kind == "fence":
            last = self.source.count("\n") - FENCE_CONTEXT
            return last if last > 1 else None
        if self.kind in ("bullet_list_open", "ordered_list_open"):
            base = _start(self.tokens or ())
            last = self.item_starts[-1] - base
            return last if last > 0 else None
        return None

    def paint(self, painter: Painter) -> tuple[Strip, ...]:
        if self.tokens is None:
            return painter.plain(self.source)
        return painter.paint(self.tokens, continued=self.continued, first_number=self.first_number)

    @property
    def item_starts(self) -> list[int]:
        """The lines at which the items of a list begin, without those of nested lists."""
        return [
            t.map[0]
            for t in self.tokens or ()
            if t.type == "list_item_open" and t.level == 1 and t.map
        ]


@dataclass(frozen=True, slots=True)
class Continuation:
    """The way in which the open end continues a frozen piece."""

    kind: str
    reopening: str = ""  # the line that reopens the fence
    next_number: int | None = None

    @classmethod
    def after(cls, piece: Block) -> Continuation:
        if piece.kind == "fence":
            return cls(piece.kind, reopening=piece.source.splitlines(keepends=True)[0])
        assert piece.tokens is not None, "only parsed blocks are cut"
        start = piece.first_number
        if start is None:
            start = int(piece.tokens[0].attrs.get("start", 1))
        return cls(piece.kind, next_number=start + len(piece.item_starts))

    def apply(self, block: Block) -> Block:
        number = self.next_number if self.kind == "ordered_list_open" else None
        return replace(block, continued=True, first_number=number)


def _commonmark() -> MarkdownIt:
    # Imported late, for a fast start.
    from markdown_it import MarkdownIt

    return MarkdownIt("commonmark", {"html": False, "maxNesting": _MAX_NESTING})


def _formula(state: StateInline, silent: bool) -> bool:
    r"""Parse a formula with its delimiters, \( \) and \[ \], which CommonMark takes for escapes."""
    sign = state.src[state.pos : state.pos + 2]
    if sign not in (r"\(", r"\)", r"\[", r"\]") or state.pos + 2 > state.posMax:
        return False
    if not silent:
        state.pending += sign
    state.pos += 2
    return True


@dataclass(frozen=True, slots=True)
class PaintedBlock:
    block: Block
    strips: tuple[Strip, ...]


class Parser:
    """Splits Markdown into top-level blocks. Remembers the link definitions it has seen."""

    def __init__(self) -> None:
        # HTML is shown as text; autolinks need no extra dependency.
        self._parser = _commonmark().enable(["table", "strikethrough"])
        self._parser.inline.ruler.before("escape", "formula", _formula)
        self._references: dict[str, Any] = {}

    @property
    def has_references(self) -> bool:
        return bool(self._references)

    def parse(self, source: str, *, keep_references: bool = True) -> list[tuple[int, Block]]:
        """Parse the source into blocks, each with its first line."""
        env: dict[str, Any] = {"references": dict(self._references)}
        tokens = self._parser.parse(source, env)
        if keep_references:
            self._references = env["references"]
        lines = source.splitlines(keepends=True)
        blocks = []
        end = len(lines)
        for span in reversed(list(top_level(tokens))):
            start = _start(span)
            blocks.append((start, _block("".join(lines[start:end]), tuple(span))))
            end = start
        return blocks[::-1]


class MarkdownStream:
    """The painted lines of a text that is still growing."""

    def __init__(self, painter: Painter) -> None:
        self._painter = painter
        self._parser = Parser()
        self._text: list[str] = []
        # The text that is not frozen yet.
        self._open = ""
        # A "\r" at the end, which may be half of "\r\n".
        self._held = ""
        self._continuation: Continuation | None = None
        # The size of the open end at which to try freezing again.
        self._next_try = 0
        self._frozen: list[PaintedBlock] = []
        self._frozen_lines: list[Strip] = []
        self._open_lines: list[Strip] = []
        self._is_dirty = False

    @classmethod
    def whole(cls, text: str, painter: Painter) -> MarkdownStream:
        """The final painting of a complete text."""
        stream = cls(painter)
        stream.feed(text)
        stream.show_final(stream.final_painting(painter))
        return stream

    @property
    def text(self) -> str:
        """Everything fed so far, cleaned."""
        if len(self._text) > 1:
            self._text = ["".join(self._text)]
        return (self._text[0] if self._text else "") + ("\n" if self._held else "")

    @property
    def num_lines(self) -> int:
        return len(self._frozen_lines) + len(self._open_lines)

    @property
    def num_frozen(self) -> int:
        """Lines at the start that no further text changes."""
        return len(self._frozen_lines)

    @property
    def num_open_lines(self) -> int:
        """The number of lines that the next flush repaints."""
        return len(self._open_lines)

    def line(self, y: int) -> Strip:
        frozen = len(self._frozen_lines)
        return self._frozen_lines[y] if y < frozen else self._open_lines[y - frozen]

    def feed(self, piece: str) -> None:
        """Add text. Nothing is parsed or painted until `flush`."""
        piece = self._held + piece
        self._held = "\r" if piece.endswith("\r") else ""
        piece = clean(piece.removesuffix("\r"))
        if not piece:
            return
        self._text.append(piece)
        self._open += piece
        self._is_dirty = True

    def flush(self) -> bool:
        """Paint new text. False if there is none."""
        if not self._is_dirty:
            return False
        self._is_dirty = False
        if len(self._open) >= self._next_try:
            self._freeze()
        self._paint_open()
        return True

    def glance(self) -> None:
        """Paint only the end of a long text, unparsed, to show until `show_final`."""
        self._is_dirty = False
        self._frozen, self._frozen_lines = [], []
        self._open = self.text
        self._continuation = None
        self._paint_open()

    def final_painting(self, painter: Painter) -> list[PaintedBlock]:
        """Parse and paint the whole text, reusing frozen lines that are right.

        Read-only, so it may run in a thread with a painter of its own while nothing is fed.
        """
        parser = Parser()
        blocks = parser.parse(self.text)
        has_links = parser.has_references or self._parser.has_references
        known = {
            p.block.source: p.strips
            for p in self._frozen
            if not p.block.continued and not (has_links and "[" in p.block.source)
        }
        return [
            PaintedBlock(block, known.get(block.source) or block.paint(painter))
            for _, block in blocks
        ]

    def show_final(self, painting: Sequence[PaintedBlock]) -> None:
        """Replace the streamed painting by what `final_painting` returned."""
        self._open = self._held = ""
        self._continuation = None
        self._is_dirty = False
        self._open_lines = []
        self._lay_out(painting)

    def repaint(self, painter: Painter) -> None:
        """Repaint everything, for another width or other colours."""
        self._painter = painter
        self._lay_out([PaintedBlock(p.block, p.block.paint(painter)) for p in self._frozen])
        self._paint_open()

    def _lay_out(self, painting: Sequence[PaintedBlock]) -> None:
        self._frozen, self._frozen_lines = [], []
        for painted in painting:
            self._append(painted)

    def _append(self, painted: PaintedBlock) -> None:
        if self._frozen_lines and painted.strips and painted.block.has_gap:
            self._frozen_lines.append(Strip.blank(0))
        self._frozen_lines.extend(painted.strips)
        self._frozen.append(painted)

    def _freeze(self) -> None:
        """Freeze the finished blocks of the open end, and pieces of a block that has grown too long."""
        self._next_try = 0
        complete = self._open[: self._open.rfind("\n") + 1]
        blocks = self._parse_open(complete)
        for _, block in blocks[:-1]:
            self._append(PaintedBlock(block, block.paint(self._painter)))
        if len(blocks) > 1:
            self._drop(blocks[-1][0])
            self._continuation = None
        if blocks:
            self._freeze_piece(blocks[-1][1])
        if len(self._open) > MAX_OPEN_SIZE:
            # It cannot be cut yet, and each attempt costs more: try again when it is a quarter larger.
            self._next_try = len(self._open) * 5 // 4

    def _freeze_piece(self, block: Block) -> None:
        """Freeze the front of a long fence or list that is still open."""
        if block.source.count("\n") <= MAX_OPEN_LINES and len(block.source) <= MAX_OPEN_SIZE:
            return
        cut = block.cut()
        if cut is None:
            return
        lines = block.source.splitlines(keepends=True)
        pieces = self._parse_open("".join(lines[:cut]), has_reopening=True)
        if len(pieces) != 1:
            return
        piece = pieces[0][1]
        self._append(PaintedBlock(piece, piece.paint(self._painter)))
        self._drop(cut)
        self._continuation = Continuation.after(piece)

    def _drop(self, num_lines: int) -> None:
        """Remove lines from the front of the open end, counted from the line that reopens a fence."""
        if self._continuation is not None and self._continuation.reopening:
            num_lines -= 1
        lines = self._open.splitlines(keepends=True)
        self._open = "".join(lines[num_lines:])

    def _parse_open(
        self, source: str, *, keep_references: bool = True, has_reopening: bool = False
    ) -> list[tuple[int, Block]]:
        """Parse the open end. The first block may continue the block frozen last."""
        continuation = self._continuation
        if continuation is None:
            return self._parser.parse(source, keep_references=keep_references)
        if not has_reopening:
            source = continuation.reopening + source
        blocks = self._parser.parse(source, keep_references=keep_references)
        if blocks and blocks[0][1].kind == continuation.kind:
            start, first = blocks[0]
            blocks[0] = (start, continuation.apply(first))
        return blocks

    def _paint_open(self) -> None:
        self._open_lines = []
        source = self._open
        if len(source) > MAX_OPEN_SIZE:
            # Only until it is finished: then all of it is parsed.
            blocks = [Block("… " + source[-MAX_OPEN_SIZE:], None)]
        else:
            blocks = [block for _, block in self._parse_open(source, keep_references=False)]
        for block in blocks:
            strips = block.paint(self._painter)
            if self.num_lines and strips and block.has_gap:
                self._open_lines.append(Strip.blank(0))
            self._open_lines.extend(strips)


def _block(source: str, tokens: tuple[Token, ...]) -> Block:
    is_code = tokens[0].type in ("fence", "code_block")
    is_whole = all(token.level < _MAX_NESTING - 1 for token in tokens)
    return Block(source, tokens if is_code or (len(source) <= PLAIN_SIZE and is_whole) else None)


def _start(tokens: Sequence[Token]) -> int:
    assert tokens[0].map is not None, "every top-level block has a position"
    return tokens[0].map[0]


def code_blocks(text: str) -> list[str]:
    """The contents of each code block, verbatim."""
    tokens = _commonmark().parse(text)
    return [t.content for t in tokens if t.type in ("fence", "code_block")]

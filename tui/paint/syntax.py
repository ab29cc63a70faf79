"""Syntax highlighting: spans of code and their styles.

The only module that imports pygments; it is imported late, for a fast start.
"""

from __future__ import annotations

from collections.abc import Iterator

from pygments.lexer import Lexer
from pygments.lexers import get_lexer_by_name
from pygments.token import Token, _TokenType
from pygments.util import ClassNotFound
from rich.style import Style

from tui.paint.theme import Palette


def spans(code: str, language: str, palette: Palette) -> Iterator[tuple[Style, int, int]]:
    """(style, start, end) of each coloured span; none for an unknown language."""
    lexer = _lexer(language)
    if lexer is None:
        return
    for start, kind, value in lexer.get_tokens_unprocessed(code):
        style = _style(kind, palette)
        if style is not None:
            yield style, start, start + len(value)


def _style(kind: _TokenType, palette: Palette) -> Style | None:
    for family, style in (
        (Token.Comment, palette.comment),
        (Token.Keyword, palette.keyword),
        (Token.Operator.Word, palette.keyword),
        (Token.Literal.String, palette.string),
        (Token.Literal.Number, palette.number),
        (Token.Name.Function, palette.name),
        (Token.Name.Class, palette.name),
        (Token.Name.Tag, palette.name),
        (Token.Name.Builtin, palette.name),
        (Token.Name.Decorator, palette.name),
    ):
        if kind[: len(family)] == family:
            return style
    return None


def _lexer(language: str) -> Lexer | None:
    try:
        return get_lexer_by_name(language, stripnl=False)
    except ClassNotFound:
        return None

"""Syntax highlighting: spans of code and their styles.

The only module that imports pygments; it is imported late, for a fast start.

A lexer may work for hours on one hostile line, inside a regular expression that holds the interpreter's lock. `re`
looks for signals meanwhile, and Python runs their handlers in the main thread alone: so code is highlighted there.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import FrameType

from pygments.lexer import Lexer
from pygments.lexers import get_lexer_by_name
from pygments.token import Token, _TokenType
from rich.style import Style

from mlxserve.system.code_languages import lexer_name
from tui.paint.theme import Palette

MAX_SECONDS = 0.5  # processor time for one piece of code; 50,000 characters take 0.07
slow_lexers: set[str] = set()  # lexers that took longer; they are not used again


class _TooSlow(BaseException):
    """A BaseException, so that no lexer catches it."""


def spans(code: str, language: str, palette: Palette) -> list[tuple[Style, int, int]]:
    """Return (style, start, end) of each coloured span.

    Empty for an unknown language or one that took too long. Call it in the main thread only.
    """
    name = lexer_name(language)
    if name is None or name in slow_lexers:
        return []
    lexer = _lexer(name)
    try:
        with _time_limit(MAX_SECONDS):
            return list(_spans(lexer, code, palette))
    except _TooSlow:
        slow_lexers.add(name)
        return []


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raise _TooSlow in this block once the process has used the seconds of CPU."""

    def stop(_number: int, _frame: FrameType | None) -> None:
        raise _TooSlow

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def _spans(lexer: Lexer, code: str, palette: Palette) -> Iterator[tuple[Style, int, int]]:
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


@cache
def _lexer(name: str) -> Lexer:
    return get_lexer_by_name(name, stripnl=False)

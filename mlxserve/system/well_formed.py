r"""Text that UTF-8 can encode: a lone surrogate becomes U+FFFD.

JavaScript cuts a text between the two halves of an emoji and writes `"a\ud83d"`, and models write
such escapes as well. JSON can carry them, and Python's strings too.
"""

from __future__ import annotations

import re
from typing import Any

REPLACEMENT = "\ufffd"
_HALF = re.compile("[\ud800-\udfff]")
_PAIR = re.compile("[\ud800-\udbff][\udc00-\udfff]")
# A replacement takes 0.3 µs and holds the interpreter's lock, so this many take at most 5 ms.
_MAX_PIECE = 1 << 14


def well_formed(text: str) -> str:
    """Replace surrogates: a matching pair by its character, others by U+FFFD."""
    if text.isascii():
        return text
    try:
        text.encode()  # faster than a search
    except UnicodeEncodeError:
        return _replaced(text)
    return text


def well_formed_value(value: Any) -> Any:
    """Make all texts of a JSON value well-formed, including keys."""
    if isinstance(value, str):
        return well_formed(value)
    if isinstance(value, dict):
        return {well_formed_value(key): well_formed_value(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [well_formed_value(item) for item in value]
    return value


def _replaced(text: str) -> str:
    text = _PAIR.sub(_joined, text)
    pieces = (text[at : at + _MAX_PIECE] for at in range(0, len(text), _MAX_PIECE))
    return "".join(_HALF.sub(REPLACEMENT, piece) for piece in pieces)


def _joined(pair: re.Match[str]) -> str:
    return pair[0].encode("utf-16-le", "surrogatepass").decode("utf-16-le")

"""JsonText: one JSON value, read character by character.

The text stays as the model wrote it, with two exceptions inside strings: control characters are
escaped (models write raw line breaks, which JSON forbids), and the escape of a lone surrogate becomes
that of U+FFFD, as clients parse it into a text that they cannot encode.
"""

from __future__ import annotations

import json
import re

from mlxserve.system.well_formed import well_formed
from mlxserve.text.parsing.cursor import BLANKS, Malformed

_LENGTH = len("\\u0000")  # length of a code's escape
_HEX = frozenset("0123456789abcdefABCDEF")
_REPLACED = "\\ufffd"
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def well_formed_json(text: str) -> str:
    """Replace lone surrogates, as characters or as escapes, in the text of a JSON value."""
    text = well_formed(text)
    if _SURROGATE.search(text) is None:
        return text
    value = JsonText()
    for char in text:
        value.push(char)
    return value.finish()


class JsonText:
    """Collects the text of one JSON value, character by character, and detects its end."""

    def __init__(self) -> None:
        self._is_in_string = False
        self._pieces: list[str] = []
        self._depth = 0
        # The escape that is being read, from its backslash on.
        self._escape = ""
        # The escape of a high surrogate, which needs that of a low one after it.
        self._half = ""
        self._first = ""

    def push(self, char: str) -> bool:
        """Add a character. True when the value is complete.

        Raises Malformed for a < outside strings: JSON has none, so it starts a marker that cuts the
        value short.
        """
        self._first = self._first or char
        if self._is_in_string:
            self._push_in_string(char)
        elif char == "<":
            raise Malformed
        else:
            self._is_in_string = char == '"'
            self._depth += (char in "{[") - (char in "}]")
            self._pieces.append(char)
        return self._first in '{["' and not self._depth and not self._is_in_string

    def take(self) -> str:
        """Return the text added since the last call, except an incomplete escape at its end."""
        taken = "".join(self._pieces)
        self._pieces.clear()
        return taken

    def finish(self) -> str:
        """Return the rest of the text; no more will come."""
        self._replace_half()
        self._pieces.append(self._escape)
        self._escape = ""
        return self.take()

    def ends_before(self, char: str) -> bool:
        """True if the value is a number or a word that ends before this character."""
        if not self._first or self._first in '{["':
            return False
        return char in BLANKS or char in ",}]<"

    def _push_in_string(self, char: str) -> None:
        if self._escape:
            self._push_in_escape(char)
        elif char == "\\":
            self._escape = char
        else:
            self._replace_half()
            self._is_in_string = char != '"'
            self._pieces.append(_escaped(char))

    def _push_in_escape(self, char: str) -> None:
        begun = self._escape
        if begun == "\\" or char in _HEX:
            self._escape += _escaped(char)
            if self._escape[1] == "u" and len(self._escape) < _LENGTH:
                return
        self._end_escape()
        # This was not the escape of a code.
        if begun != "\\" and char not in _HEX:
            self._push_in_string(char)

    def _end_escape(self) -> None:
        escape, self._escape = self._escape, ""
        code = int(escape[2:], 16) if len(escape) == _LENGTH else 0
        if self._half and 0xDC00 <= code < 0xE000:
            self._pieces += (self._half, escape)
            self._half = ""
            return
        self._replace_half()
        if 0xD800 <= code < 0xDC00:
            self._half = escape
        else:
            self._pieces.append(_REPLACED if 0xDC00 <= code < 0xE000 else escape)

    def _replace_half(self) -> None:
        if self._half:
            self._pieces.append(_REPLACED)
            self._half = ""


def _escaped(char: str) -> str:
    return json.dumps(char)[1:-1] if char < " " else char

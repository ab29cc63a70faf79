"""JsonText: one JSON value, read and repaired character by character.

The text stays as the model wrote it, except where JSON has another way to say the same: raw control
characters in strings are escaped, quotes and words of Python become those of JSON, and a comma
before a closing bracket is dropped. The escape of a lone surrogate becomes that of U+FFFD, as
clients parse it into a text that they cannot encode.
"""

from __future__ import annotations

import json
import re
import string

from mlxserve.system.well_formed import well_formed
from mlxserve.text.parsing.cursor import BLANKS
from mlxserve.text.parsing.values import Malformed

WORDS = {"True": "true", "False": "false", "None": "null"}
_LENGTH = len("\\u0000")  # length of a code's escape
_HEX = frozenset(string.hexdigits)
_OF_WORDS = frozenset(string.ascii_letters + string.digits + "_+-.")
_REPLACED = "\\ufffd"
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_NESTED = "{[\"'"  # first characters of values with an end of their own


def well_formed_json(text: str) -> str:
    """Replace lone surrogates, as characters or as escapes, in the text of a JSON value."""
    text = well_formed(text)
    return text if _SURROGATE.search(text) is None else repaired_json(text)


def repaired_json(text: str) -> str:
    """Repair the text of a value as a whole. Raises Malformed for a < outside strings."""
    value = JsonText()
    for char in text:
        value.push(char)
    return value.finish()


class JsonText:
    """Collects the text of one JSON value, character by character, and detects its end."""

    def __init__(self) -> None:
        self._first = ""
        self._pieces: list[str] = []
        self._depth = 0
        # What ends the string that is being read.
        self._quote = ""
        # The number or word that is being read.
        self._word = ""
        # A comma, or a quote of Python, and white space: the next character tells what it means.
        self._pending = ""
        # The escape that is being read, from its backslash on.
        self._escape = ""
        # The escape of a high surrogate, which needs that of a low one after it.
        self._half = ""

    def push(self, char: str) -> bool:
        """Add a character. True when the value is complete.

        Raises Malformed for a < outside strings: JSON has none, so it starts a marker that cuts the
        value short.
        """
        self._first = self._first or char
        if self._quote:
            self._push_in_string(char)
        else:
            self._push_outside(char)
        return self._first in _NESTED and not self._depth and not self._quote

    def take(self) -> str:
        """Return the text added since the last call, except what may still be repaired."""
        taken = "".join(self._pieces)
        self._pieces.clear()
        return taken

    def finish(self) -> str:
        """Return the rest of the text; no more will come."""
        self._replace_half()
        self._end_word()
        self._pieces += (self._escape, self._pending)
        self._escape = self._pending = ""
        return self.take()

    def ends_before(self, char: str) -> bool:
        """True if the value is a number or a word that ends before this character."""
        if not self._first or self._first in _NESTED:
            return False
        return char in BLANKS or char in ",}]<"

    def _push_outside(self, char: str) -> None:
        if char == "<":
            raise Malformed
        if char in _OF_WORDS:
            self._settle()
            self._word += char
            return
        self._end_word()
        if char == "," or (self._pending and char in BLANKS):
            self._pending += char
            return
        self._settle(drops_comma=char in "}]")
        self._quote = char if char in "\"'" else ""
        self._depth += (char in "{[") - (char in "}]")
        self._pieces.append('"' if self._quote else char)

    def _end_word(self) -> None:
        self._pieces.append(WORDS.get(self._word, self._word))
        self._word = ""

    def _settle(self, *, drops_comma: bool = False) -> None:
        self._pieces.append(self._pending[1:] if drops_comma else self._pending)
        self._pending = ""

    def _push_in_string(self, char: str) -> None:
        if self._pending:
            self._push_after_quote(char)
        elif self._escape:
            self._push_in_escape(char)
        elif char == "\\":
            self._escape = char
        elif char != self._quote:
            self._replace_half()
            self._pieces.append(_escaped(char))
        elif char == "'" and self._depth:
            self._pending = char
        else:
            self._end_string()

    def _push_after_quote(self, char: str) -> None:
        """End a string of Python, or continue it: models forget to escape quotes in texts."""
        if char in BLANKS:
            self._pending += char
            return
        pending, self._pending = self._pending, ""
        if char in ",:}]":
            self._end_string()
            self._pieces.append(pending[1:])
            self._push_outside(char)
        else:
            self._pieces += map(_escaped, pending)
            self._push_in_string(char)

    def _end_string(self) -> None:
        self._replace_half()
        self._quote = ""
        self._pieces.append('"')

    def _push_in_escape(self, char: str) -> None:
        begun = self._escape
        if begun == "\\" or char in _HEX:
            self._escape = "'" if begun + char == "\\'" else begun + _escaped(char, begun)
            if self._escape[1:2] == "u" and len(self._escape) < _LENGTH:
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


def _escaped(char: str, after: str = "") -> str:
    is_escaped = char < " " or (char == '"' and not after)
    return json.dumps(char)[1:-1] if is_escaped else char

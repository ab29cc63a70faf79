"""JsonText: one JSON value, read character by character.

The text stays as the model wrote it, except that control characters inside strings (models write
raw line breaks, which JSON forbids) are escaped.
"""

from __future__ import annotations

import json

from mlxserve.text.parsing.cursor import BLANKS, Malformed


class JsonText:
    """Collects the text of one JSON value, character by character, and detects its end."""

    def __init__(self) -> None:
        self._is_in_string = False
        self._pieces: list[str] = []
        self._depth = 0
        self._is_escaped = False
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
        """The text added since the last call."""
        taken = "".join(self._pieces)
        self._pieces.clear()
        return taken

    def ends_before(self, char: str) -> bool:
        """Whether the value is a number or a word that ends before this character."""
        if not self._first or self._first in '{["':
            return False
        return char in BLANKS or char in ",}]<"

    def _push_in_string(self, char: str) -> None:
        if self._is_escaped:
            self._is_escaped = False
        elif char == "\\":
            self._is_escaped = True
        elif char == '"':
            self._is_in_string = False
        self._pieces.append(json.dumps(char)[1:-1] if char < " " else char)

"""Incremental parser of one call written as a JSON object: {"name": ..., "arguments": {...}}.

Arguments are passed on character by character, as the model wrote them, except that control
characters inside strings (models write raw line breaks, which JSON forbids) are escaped.
"""

from __future__ import annotations

import json
from enum import Enum, auto

_BLANKS = " \t\r\n"
_ARGUMENTS = frozenset({"arguments", "parameters"})


class _At(Enum):
    OPENING = auto()  # before the {
    KEY = auto()  # before a key, or the }
    IN_KEY = auto()
    COLON = auto()
    VALUE = auto()  # before a value
    IN_VALUE = auto()
    DONE = auto()
    BROKEN = auto()


class JsonText:
    """Collects the text of one JSON value, character by character, and detects its end."""

    def __init__(self) -> None:
        self.text = ""
        self.is_in_string = False
        self.is_cut = False
        self._pieces: list[str] = []
        self._depth = 0
        self._is_escaped = False
        self._first = ""

    def push(self, char: str) -> bool:
        """Add a character. True when the value is complete; `text` then holds it.

        A number or a word ends before the first character that is not part of it, and leaves that
        character to the caller. JSON has no < outside strings: it starts a marker that cuts the
        value short.
        """
        if not self._first:
            self._first = char
        if char == "<" and not self.is_in_string and self._depth:
            self.is_cut = True
        if self.is_cut:
            return False
        if self.is_in_string:
            self._push_in_string(char)
        elif char == '"':
            self.is_in_string = True
            self._pieces.append(char)
        elif char in "{[":
            self._depth += 1
            self._pieces.append(char)
        elif char in "}]" and self._depth:
            self._depth -= 1
            self._pieces.append(char)
        elif self._depth or not self.ends_before(char):
            self._pieces.append(char)
        else:
            return self._end()
        if self._first in '{["' and not self._depth and not self.is_in_string:
            return self._end()
        return False

    def take(self) -> str:
        """The text added since the last call."""
        taken = "".join(self._pieces)
        self._pieces.clear()
        return taken

    def ends_before(self, char: str) -> bool:
        """Whether the value is a number or a word that ends before this character."""
        return self._first not in '{["' and (char in _BLANKS or char in ",}]<")

    def _push_in_string(self, char: str) -> None:
        if self._is_escaped:
            self._is_escaped = False
        elif char == "\\":
            self._is_escaped = True
        elif char == '"':
            self.is_in_string = False
        self._pieces.append(json.dumps(char)[1:-1] if char < " " else char)

    def _end(self) -> bool:
        self.text = "".join(self._pieces)
        return True


class JsonCall:
    """Parses the object. `name` is set before `take` returns any arguments."""

    def __init__(self) -> None:
        self.name: str | None = None
        self._at = _At.OPENING
        self._key = ""
        self._value = JsonText()
        self._arguments: str | None = None  # complete; came before the name, or as a string
        self._is_streaming = False  # pass the current value on as it arrives
        self._has_streamed = False
        self._ready = ""

    @property
    def is_done(self) -> bool:
        return self._at is _At.DONE

    @property
    def is_broken(self) -> bool:
        return self._at is _At.BROKEN

    @property
    def is_complete(self) -> bool:
        """Whether name and arguments are known; the closing brace may still be missing."""
        return self.name is not None and (self._has_streamed or self._arguments is not None)

    def push(self, char: str) -> None:
        match self._at:
            case _At.OPENING:
                if char not in _BLANKS:
                    self._at = _At.KEY if char == "{" else _At.BROKEN
            case _At.KEY:
                self._before_key(char)
            case _At.IN_KEY:
                if self._value.push(char):
                    self._key = _string(self._value.text) or ""
                    self._at = _At.COLON
            case _At.COLON:
                if char not in _BLANKS:
                    self._at = _At.VALUE if char == ":" else _At.BROKEN
            case _At.VALUE:
                if char not in _BLANKS:
                    self._begin_value(char)
            case _At.IN_VALUE:
                self._in_value(char)

    def take(self) -> str:
        """Arguments added since the last call; empty before the name is known."""
        if self.is_done and not self._has_streamed:
            self._has_streamed = True
            self._ready = "{}" if self._arguments is None else self._arguments
        taken, self._ready = self._ready, ""
        return taken + self._value.take() if self._is_streaming else taken

    def _before_key(self, char: str) -> None:
        if char == '"':
            self._value = JsonText()
            self._value.push(char)
            self._at = _At.IN_KEY
        elif char == "}" or (char == "<" and self.is_complete):
            self._at = _At.DONE if self.name is not None else _At.BROKEN
        elif char not in _BLANKS and char != ",":
            self._at = _At.BROKEN

    def _begin_value(self, char: str) -> None:
        if char in ",}]<":  # the value is missing
            self._at = _At.BROKEN
            return
        self._value = JsonText()
        self._at = _At.IN_VALUE
        if self._key in _ARGUMENTS and char == "{" and self.name and not self._has_streamed:
            self._is_streaming = self._has_streamed = True
        self._in_value(char)

    def _in_value(self, char: str) -> None:
        if not self._value.push(char):
            if self._value.is_cut:
                self._at = _At.BROKEN
            return
        self._at = _At.KEY
        if self._is_streaming:
            self._ready += self._value.take()
            self._is_streaming = False
        elif self._key == "name" and self.name is None:
            self._set_name(_string(self._value.text))
        elif self._key in _ARGUMENTS and not self._has_streamed:
            self._set_arguments(self._value.text)
        if self._value.ends_before(char):
            self.push(char)

    def _set_name(self, name: str | None) -> None:
        self.name = name
        if not name:
            self._at = _At.BROKEN

    def _set_arguments(self, text: str) -> None:
        inner = _string(text)
        self._arguments = "{}" if text == "null" else text if inner is None else inner


def _string(text: str) -> str | None:
    """The value of a JSON string; None for any other text."""
    if not text.startswith('"'):
        return None
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, str) else None

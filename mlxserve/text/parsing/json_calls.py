"""Readers of calls with JSON arguments.

The name is in the object beside the arguments, or in a header before them.
"""

from __future__ import annotations

import json
import re

from mlxserve.text.parsing.cursor import BLANKS, Cursor, Reading
from mlxserve.text.parsing.formats import LONGEST_HEADER
from mlxserve.text.parsing.json_text import JsonText
from mlxserve.text.parsing.syntax import CallSyntax
from mlxserve.text.parsing.values import Malformed, json_value, kind_of

_NAMES = frozenset({"name", "tool_name", "function"})
_IDS = frozenset({"id", "tool_call_id"})
_ARGUMENTS = frozenset({"arguments", "parameters", "args"})
_OTHERS = frozenset({"type", "description", "thoughts"})  # keys that are not a tool's name


def read_value(cursor: Cursor) -> Reading[str]:
    """Read one JSON value as text."""
    value = JsonText()
    while True:
        char = yield from cursor.char()
        if value.ends_before(char):
            return value.take()
        cursor.take(1)
        if value.push(char):
            return value.take()


class JsonSyntax(CallSyntax):
    """`{"name": ..., "arguments": {...}}`, or `{NAME: {...}}`. A list of them is one, too."""

    debris = ",;]}"
    begins = "{"

    def read_first(self) -> Reading[None]:
        yield from self.cursor.skip(BLANKS + "[")
        yield from self.read_call()

    def read_call(self) -> Reading[None]:
        self._name: str | None = None
        self._id: str | None = None
        self._arguments: str | None = None
        self._is_streamed = False
        yield from self.cursor.expect("{")
        while (key := (yield from self._read_key())) is not None:
            yield from self._read_member(key)
        # An answer that speaks of a tool by its name is no call.
        if not self._name or (not self.section.is_certain and self._arguments is None):
            raise Malformed
        if not self._is_streamed:
            yield from self.emit(self._name, self._arguments or "{}", self._id)

    def _read_key(self) -> Reading[str | None]:
        """Read the next key, with its colon; None at the end of the object."""
        cursor = self.cursor
        yield from cursor.skip(BLANKS + ",")
        char = yield from cursor.char()
        if char == "<" and self._name and self._arguments is not None:
            # The closing brace is missing.
            return None
        if (yield from cursor.accepts("}")):
            return None
        if char not in "\"'":
            raise Malformed
        key = _string((yield from read_value(cursor)))
        yield from cursor.skip()
        yield from cursor.expect(":")
        yield from cursor.skip()
        return key or ""

    def _read_member(self, key: str) -> Reading[None]:
        is_object = (yield from self.cursor.char()) == "{"
        is_keyed = self.row.call.startswith('{"$name"') and key not in _OTHERS
        if is_keyed and is_object and self._name is None:
            self._name = key
            yield from self._read_arguments(key)
        elif is_object and self._name and key in _ARGUMENTS and self._arguments is None:
            yield from self._read_arguments(self._name)
        else:
            self._take(key, (yield from read_value(self.cursor)))

    def _read_arguments(self, name: str) -> Reading[None]:
        if "[TOOL_CALLS]" in self.row.starts and self._id is None:
            self._arguments = yield from read_value(self.cursor)  # the id comes after them
            return
        yield from self.stream(name, self._id)
        self._arguments, self._is_streamed = "{}", True

    def _take(self, key: str, text: str) -> None:
        """Store a member. Raises Malformed for one that no call has."""
        if key in _ARGUMENTS:
            self._arguments = self._arguments or _object(text)
        elif key == "function" and text.startswith("{"):
            self._name, self._arguments = _inner(text)
        elif key in _NAMES:
            self._name = self._name or _string(text)
            self.check(self._name or "")
        elif key in _IDS:
            self._id = _string(text)
        elif not self.section.is_certain and (key not in _OTHERS or key == "description"):
            raise Malformed


class HeadedSyntax(CallSyntax):
    """A name in markup, then an object of arguments."""

    def read_call(self) -> Reading[None]:
        cursor = self.cursor
        yield from cursor.skip()
        header, marker = yield from cursor.until("{", *self.row.ends, max_length=LONGEST_HEADER)
        match = re.fullmatch(self.row.header, header.strip())
        if marker != "{" or match is None:
            raise Malformed
        yield from self.stream(match["name"], match.groupdict().get("id"), "{")

    def may_follow(self) -> Reading[bool]:
        char = yield from self.cursor.char()
        return self.row.joint is not None and (char == "<" or char.isalnum())


class MessageSyntax(CallSyntax):
    """Reads arguments alone: the header of the message had the name."""

    def read_call(self) -> Reading[None]:
        yield from self.cursor.skip()
        if (yield from self.cursor.char()) != "{":
            raise Malformed
        yield from self.stream(self.section.name or "", None)


def _string(text: str) -> str | None:
    """The value of a JSON string; None for any other text."""
    try:
        value = json_value(text)
    except Malformed:
        return None
    return value if isinstance(value, str) else None


def _object(text: str) -> str:
    """Return an object's text, which may itself be a JSON string. Raises Malformed."""
    inner = _string(text)
    text = text if inner is None else inner
    kind = kind_of(json_value(text))
    if kind not in ("object", "null"):
        raise Malformed
    return "{}" if kind == "null" else text


def _inner(text: str) -> tuple[str | None, str]:
    """Unpack {"function": {"name": ..., "arguments": ...}}. Raises Malformed."""
    inner = json_value(text)
    arguments = inner.get("arguments", inner.get("parameters", {}))
    name = inner.get("name")
    return name if isinstance(name, str) else None, _object(json.dumps(arguments))

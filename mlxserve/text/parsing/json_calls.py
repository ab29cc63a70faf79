"""Calls whose arguments are JSON: an object with the name and the arguments, or a header with the
name before them.
"""

from __future__ import annotations

import json
import re

from mlxserve.text.parsing.cursor import BLANKS, Cursor, Malformed, Reading
from mlxserve.text.parsing.json_text import JsonText
from mlxserve.text.parsing.syntax import CallSyntax
from mlxserve.text.parsing.values import json_value, kind_of

_NAMES = frozenset({"name", "tool_name", "function"})
_IDS = frozenset({"id", "tool_call_id"})
_ARGUMENTS = frozenset({"arguments", "parameters"})
_OTHERS = frozenset({"type", "description", "thoughts"})  # keys that are not a tool's name
_LONGEST_HEADER = 512


def read_value(cursor: Cursor) -> Reading[str]:
    """The text of one JSON value."""
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
        is_keyed = self.row.call.startswith('{"$name"')
        cursor = self.cursor
        name = call_id = arguments = None
        is_streamed = False
        yield from cursor.expect("{")
        while True:
            yield from cursor.skip(BLANKS + ",")
            char = yield from cursor.char()
            if char == "}":
                cursor.take(1)
                break
            if char == "<" and name and arguments is not None:
                break  # the closing brace is missing
            if char != '"':
                raise Malformed
            key = _string((yield from read_value(cursor)))
            yield from cursor.skip()
            yield from cursor.expect(":")
            yield from cursor.skip()
            is_object = (yield from cursor.char()) == "{"
            is_name = is_keyed and name is None and key not in _OTHERS and is_object
            name = key if is_name else name
            if (is_name or (key in _ARGUMENTS and arguments is None)) and name and is_object:
                if "[TOOL_CALLS]" in self.row.starts and call_id is None:
                    arguments = yield from read_value(cursor)  # the id comes after them
                else:
                    yield from self.stream(name, call_id)
                    arguments, is_streamed = "{}", True
                continue
            text = yield from read_value(cursor)
            if key in _ARGUMENTS:
                arguments = arguments or _object(text)
            elif key == "function" and is_object:
                name, arguments = _inner(text)
            elif key in _NAMES:
                name = name or _string(text)
                self.check(name or "")
            elif key in _IDS:
                call_id = _string(text)
            elif self.is_guess and key not in _OTHERS:
                raise Malformed
        if not name:
            raise Malformed
        if not is_streamed:
            yield from self.emit(name, arguments or "{}", call_id)


class HeadedSyntax(CallSyntax):
    """A name in markup, then an object of arguments."""

    def read_call(self) -> Reading[None]:
        cursor = self.cursor
        yield from cursor.skip()
        header, marker = yield from cursor.until("{", *self.row.ends, most=_LONGEST_HEADER)
        found = re.fullmatch(self.row.header, header.strip())
        if marker != "{" or found is None:
            raise Malformed
        groups = found.groupdict()
        name = groups["name"] or groups.get("plain") or ""
        yield from self.stream(name, groups.get("id"), "{")

    def may_follow(self) -> Reading[bool]:
        char = yield from self.cursor.char()
        return self.row.joint is not None and (char == "<" or char.isalnum())


class MessageSyntax(CallSyntax):
    """The arguments alone: the header of the message had the name."""

    name = ""

    def read_call(self) -> Reading[None]:
        yield from self.cursor.skip()
        if (yield from self.cursor.char()) != "{":
            raise Malformed
        yield from self.stream(self.name, None)


def _string(text: str) -> str | None:
    """The value of a JSON string; None for any other text."""
    try:
        value = json_value(text)
    except ValueError:
        return None
    return value if isinstance(value, str) else None


def _object(text: str) -> str:
    """The text of an object, which may itself be written as a string. Raises Malformed."""
    inner = _string(text)
    text = text if inner is None else inner
    try:
        kind = kind_of(json_value(text))
    except ValueError as error:
        raise Malformed from error
    if kind not in ("object", "null"):
        raise Malformed
    return "{}" if kind == "null" else text


def _inner(text: str) -> tuple[str | None, str]:
    """Name and arguments of {"function": {"name": ..., "arguments": ...}}. Raises Malformed."""
    try:
        inner = json_value(text)
    except ValueError as error:
        raise Malformed from error
    arguments = inner.get("arguments", inner.get("parameters", {}))
    name = inner.get("name")
    return name if isinstance(name, str) else None, _object(json.dumps(arguments))

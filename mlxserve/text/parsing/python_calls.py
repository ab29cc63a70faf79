"""Calls in Python's syntax, and in the objects of Gemma."""

from __future__ import annotations

import ast
import json
import re

from mlxserve.text.parsing.cursor import BLANKS, Reading
from mlxserve.text.parsing.formats import NAME_CHARS
from mlxserve.text.parsing.json_calls import read_value
from mlxserve.text.parsing.json_text import WORDS
from mlxserve.text.parsing.syntax import CallSyntax
from mlxserve.text.parsing.values import Malformed, json_value, object_json, to_json, value_json

_CLOSERS = {"[": "]", "(": ")", "{": "}"}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "\n": ""}
_QUOTE = '"'
_PADDED = re.compile(r"(-?)0++(\d*+)")  # a whole number that begins with zeros
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|x([0-9a-fA-F]{2})|(.))", re.DOTALL)


class PythonSyntax(CallSyntax):
    """`[name(key=value, ...), ...]`, or one call a line. Texts may hold quotes of their own kind."""

    debris = ","
    is_listed = False

    def read_first(self) -> Reading[None]:
        yield from self.cursor.skip()
        self.is_listed = yield from self.cursor.accepts("[")
        yield from self.read_call()

    def read_call(self) -> Reading[None]:
        cursor = self.cursor
        yield from cursor.skip()
        name = yield from cursor.word(NAME_CHARS)
        yield from cursor.expect("(")
        self.check(name)
        arguments: dict[str, str] = {}
        while (yield from cursor.has_item(")", is_first=not arguments)):
            key = yield from cursor.word(NAME_CHARS)
            yield from cursor.skip()
            if not key or key in arguments:
                raise Malformed
            yield from cursor.expect("=")
            arguments[key] = yield from self._read(is_argument=True)
        yield from self.emit(name, object_json(arguments))

    def may_follow(self) -> Reading[bool]:
        if (yield from self.cursor.accepts("]")):
            self.cursor.mark()
            yield from self.cursor.skip()
            if (yield from self.cursor.accepts_any(self.row.ends)):
                self.cursor.mark()
            return False
        is_name = (yield from self.cursor.char()) in NAME_CHARS
        return is_name and (self.is_listed or not self.row.is_bare)

    def _read(self, *, is_argument: bool = False) -> Reading[str]:
        """A value, as JSON."""
        cursor = self.cursor
        yield from cursor.skip()
        char = yield from cursor.char()
        if char in "\"'":
            return to_json((yield from self._read_text(is_argument=is_argument)))
        if char in _CLOSERS:
            return (yield from self._read_items(_CLOSERS[char]))
        word = (yield from cursor.before(",)]}:\n")).strip()
        return WORDS.get(word) or _number(word)

    def _read_items(self, closer: str) -> Reading[str]:
        """A list, a tuple, a dictionary or a set; JSON has lists and objects."""
        cursor = self.cursor
        cursor.take(1)
        items: list[str] = []
        are_pairs: set[bool] = set()
        while (yield from cursor.has_item(closer, is_first=not items)):
            item = yield from self._read()
            yield from cursor.skip()
            is_pair = closer == "}" and (yield from cursor.accepts(":"))
            if is_pair:
                key = item if item[0] == _QUOTE else to_json(item)
                item = f"{key}: {(yield from self._read())}"
            are_pairs.add(is_pair)
            items.append(item)
        if len(are_pairs) > 1:
            raise Malformed
        joined = ", ".join(items)
        return f"{{{joined}}}" if closer == "}" and are_pairs != {False} else f"[{joined}]"

    def _read_text(self, *, is_argument: bool) -> Reading[str]:
        cursor = self.cursor
        quote = cursor.take(1)
        if (yield from cursor.accepts(quote * 2)):
            if not (yield from cursor.sees(quote)) and (yield from self._closes(is_argument)):
                return ""
            text, _ = yield from cursor.until(quote * 3)
            return _unescaped(text)
        pieces: list[str] = []
        while True:
            if (yield from cursor.char()) == "\\":
                yield from cursor.char(1)
                pieces.append(cursor.take(2))
                continue
            char = cursor.take(1)
            if char == quote and (yield from self._closes(is_argument)):
                return _unescaped("".join(pieces))
            pieces.append(char)

    def _closes(self, is_argument: bool) -> Reading[bool]:
        """True if the quote just taken ends its text: models forget to escape those inside.

        Then what follows has to continue as a call does: `)]`, `), `, or `, key=`.
        """
        at, char = yield from self.cursor.ahead(0)
        if not is_argument:
            return char in ",]}):"
        if char == ")":
            at, char = yield from self.cursor.ahead(at + 1, " \t\r")
            return char in ",]\n<"
        if char != ",":
            return False
        at, char = yield from self.cursor.ahead(at + 1)
        if char == ")":
            return True
        begin = at
        while char in NAME_CHARS:
            at, char = yield from self.cursor.ahead(at + 1, "")
        if at == begin:
            return False
        at, char = yield from self.cursor.ahead(at)
        return char == "="


class ObjectSyntax(CallSyntax):
    """`call:name{key:value, ...}`; texts are in quotes of the format's own, and keys in none."""

    begins = "c"

    def read_call(self) -> Reading[None]:
        yield from self.cursor.skip(f"{BLANKS}:")
        yield from self.cursor.expect("call:")
        name = yield from self.cursor.word(NAME_CHARS)
        yield from self.cursor.skip()
        if not (yield from self.cursor.sees("{")):
            raise Malformed
        self.check(name)
        yield from self.emit(name, (yield from self._read()))

    def _read(self) -> Reading[str]:
        """A value, as JSON."""
        cursor, quote = self.cursor, self.row.quote
        yield from cursor.skip()
        char = yield from cursor.char()
        if (yield from cursor.accepts(quote)):
            begins = [f"{start}call:" for start in self.row.starts]
            return to_json((yield from cursor.extent(quote, *begins, is_end=self._is_end)))
        if char == '"':
            return (yield from read_value(cursor))
        if char not in "{[":
            return (yield from self._read_plain())
        cursor.take(1)
        closer = "]" if char == "[" else "}"
        items: dict[str, str] = {}
        while (yield from cursor.has_item(closer, is_first=not items)):
            key = str(len(items)) if char == "[" else (yield from self._read_key())
            items[key] = yield from self._read()
        return f"[{', '.join(items.values())}]" if char == "[" else object_json(items)

    def _is_end(self, marker: str) -> Reading[bool | None]:
        """True if a quote ends its text. Raises Malformed where another call begins."""
        if marker != self.row.quote:
            raise Malformed
        return (yield from self.cursor.ahead(0))[1] in ",}]"

    def _read_key(self) -> Reading[str]:
        if (yield from self.cursor.sees('"')):
            key = str(json_value((yield from read_value(self.cursor))))
            yield from self.cursor.skip()
            yield from self.cursor.expect(":")
            return key
        text, marker = yield from self.cursor.until(":", "}", *self.row.starts[:1])
        key = text.strip().removeprefix(self.row.quote).removesuffix(self.row.quote)
        if marker != ":" or not key or set(key) & set("{,["):
            raise Malformed
        return key

    def _read_plain(self) -> Reading[str]:
        """A JSON scalar; any other word is a text."""
        text = (yield from self.cursor.before(",}]<{[:")).strip()
        if (yield from self.cursor.char()) in "<{[:":
            raise Malformed
        return WORDS.get(text) or value_json(text, frozenset())


def _number(word: str) -> str:
    """A number as JSON, with all its digits. Raises Malformed for any other word."""
    if padded := _PADDED.fullmatch(word):
        word = f"{padded[1]}{padded[2] or 0}"
    try:
        value = json_value(word)
    except Malformed:
        try:
            value = ast.literal_eval(word)
            # Fails for what JSON cannot write: an infinity, and an integer of thousands of digits.
            word = json.dumps(value, allow_nan=False) if isinstance(value, int | float) else ""
        except (ValueError, SyntaxError, MemoryError, RecursionError) as error:
            raise Malformed from error
    if not word or isinstance(value, str | list | dict):
        raise Malformed
    return word


def _unescaped(text: str) -> str:
    """Decode the escapes of Python and JSON; others stay as they are."""

    def one(match: re.Match[str]) -> str:
        code, byte, char = match.groups()
        if char is None:
            return chr(int(code or byte, 16))
        return _ESCAPES.get(char, char if char in "\\'\"" else f"\\{char}")

    text = _ESCAPE.sub(one, text)
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")

"""Readers of one section of calls: the text from its opening marker to its end.

A reader accepts text in pieces of any size and yields events; `rest` is the text after the
section. Arguments of JSON formats stream; for other formats mlx-lm's parser reads the whole section
at its end. Whatever cannot be parsed becomes text, so that no output of the model is lost.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias
from uuid import uuid4

from mlxserve.text.parsing.json_call import JsonCall, JsonText
from mlxserve.text.parsing.markup import Markup
from mlxserve.text.parsing.overlap import overlap
from mlxserve.text.parsing.turn import ToolCallDelta

MAX_SECTION = 1 << 20  # characters passed to mlx-lm's parsers, some of which are superlinear
# What a parser written for well-formed calls may raise on malformed ones.
_PARSE_ERRORS = (
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
    SyntaxError,
    RecursionError,
    MemoryError,  # raised by ast for deep nesting
)


@dataclass(frozen=True, slots=True)
class TextDelta:
    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    text: str


Event: TypeAlias = TextDelta | ReasoningDelta | ToolCallDelta


class CallNumbers:
    """Numbers an answer's calls and gives each an id."""

    def __init__(self) -> None:
        self.count = 0

    def open(self, name: str, arguments: str = "", call_id: str | None = None) -> ToolCallDelta:
        self.count += 1
        call_id = call_id or f"call_{uuid4().hex[:24]}"
        return ToolCallDelta(self.count - 1, call_id, name, arguments)

    def more(self, arguments: str) -> ToolCallDelta:
        return ToolCallDelta(self.count - 1, arguments=arguments)


class CallReader(ABC):
    """Reads one section. `rest` is None until the end of the section was seen."""

    def __init__(
        self, markup: Markup, tools: Sequence[Mapping[str, Any]], numbers: CallNumbers
    ) -> None:
        self.rest: str | None = None
        self.first = numbers.count  # index of the section's first call
        self._markup = markup
        self._tools = tools
        self._numbers = numbers

    @abstractmethod
    def push(self, text: str) -> Iterator[Event]: ...

    @abstractmethod
    def finish(self) -> Iterator[Event]:
        """End of the answer."""

    def _parsed(self, section: str) -> Iterator[Event]:
        """The calls of a whole section as mlx-lm parses them, or the section as text."""
        parse = self._markup.parse_call
        try:
            if parse is None or len(section) > MAX_SECTION:
                raise ValueError("no parser, or too long for it")
            found = parse(section, list(self._tools))
            calls = [_checked(call) for call in (found if isinstance(found, list) else [found])]
        except _PARSE_ERRORS:
            if section.strip():
                yield TextDelta(section)
            return
        for name, arguments, call_id in calls:
            yield self._numbers.open(name, arguments, call_id)


class SectionReader(CallReader):
    """Reads any format by waiting for the end of the section."""

    def __init__(
        self, markup: Markup, tools: Sequence[Mapping[str, Any]], numbers: CallNumbers
    ) -> None:
        super().__init__(markup, tools, numbers)
        self._pieces: list[str] = []
        self._tail = ""  # may be the beginning of the end marker

    def push(self, text: str) -> Iterator[Event]:
        end = self._markup.call_end
        self._pieces.append(text)
        window = self._tail + text
        at = window.find(end) if end else -1
        if at < 0:
            self._tail = window[len(window) - overlap(window, (end,)) :] if end else ""
            return
        section = "".join(self._pieces)
        at += len(section) - len(window)
        self.rest = section[at + len(end) :]
        yield from self._parsed(section[:at])

    def finish(self) -> Iterator[Event]:
        yield from self._parsed("".join(self._pieces))


class _Skip(SectionReader):
    """Drops the rest of a section whose calls have been read."""

    def _parsed(self, section: str) -> Iterator[Event]:  # noqa: ARG002
        yield from ()


class _Streaming(CallReader):
    """Reads character by character, until another reader takes over."""

    def __init__(
        self, markup: Markup, tools: Sequence[Mapping[str, Any]], numbers: CallNumbers
    ) -> None:
        super().__init__(markup, tools, numbers)
        self._next: CallReader | None = None
        self._seen: list[str] = []

    def push(self, text: str) -> Iterator[Event]:
        for at, char in enumerate(text):
            if self._next is not None:
                yield from self._next.push(text[at:])
                break
            self._seen.append(char)
            yield from self._push(char)
            if self.rest is not None:
                self.rest += text[at + 1 :]
                return
        yield from self._pending()
        if self._next is not None:
            self.rest = self._next.rest

    def finish(self) -> Iterator[Event]:
        if self._next is None and self._numbers.count == self.first:
            yield from self._hand_over(SectionReader, "".join(self._seen))
        if self._next is not None:
            yield from self._next.finish()

    def _hand_over(self, reader: type[CallReader], text: str) -> Iterator[Event]:
        self._next = reader(self._markup, self._tools, self._numbers)
        yield from self._next.push(text)

    @abstractmethod
    def _push(self, char: str) -> Iterator[Event]: ...

    @abstractmethod
    def _pending(self) -> Iterator[Event]:
        """Arguments that were read but not yielded yet."""


class JsonReader(_Streaming):
    """Reads `{"name": ..., "arguments": {...}}`: one call, then the closing marker."""

    def __init__(
        self, markup: Markup, tools: Sequence[Mapping[str, Any]], numbers: CallNumbers
    ) -> None:
        super().__init__(markup, tools, numbers)
        self._call = JsonCall()
        self._is_named = False

    def _push(self, char: str) -> Iterator[Event]:
        self._call.push(char)
        name = self._call.name
        if name and not self._is_named and self._accepts(name):
            self._is_named = True
            yield self._numbers.open(name)
        if self._is_named and (self._call.is_done or self._call.is_broken):
            yield from self._pending()
            yield from self._hand_over(_Skip, char)
        elif not self._is_named and (self._call.is_broken or name):
            yield from self._give_up()

    def _accepts(self, name: str) -> bool:  # noqa: ARG002
        """Whether this name makes it a call."""
        return True

    def _give_up(self) -> Iterator[Event]:
        """The section is not a call in this format."""
        yield from self._hand_over(SectionReader, "".join(self._seen))

    def _pending(self) -> Iterator[Event]:
        if self._is_named and (arguments := self._call.take()):
            yield self._numbers.more(arguments)


class BareReader(JsonReader):
    """Reads a call without a marker. An answer that does not call one of the tools is text."""

    def _accepts(self, name: str) -> bool:
        return any(tool["function"]["name"] == name for tool in self._tools)

    def _give_up(self) -> Iterator[Event]:
        self.rest = "".join(self._seen)
        yield from ()

    def finish(self) -> Iterator[Event]:
        if not self._is_named and self._seen:
            yield TextDelta("".join(self._seen))


@dataclass(frozen=True, slots=True)
class Header:
    """How a format writes the name before a call's arguments.

    separator: what ends the header
    pattern: finds the name before the separator, and the call's id if the format has one
    """

    separator: str
    pattern: re.Pattern[str]


HEADERS = {
    "kimi_k2": Header(
        "<|tool_call_argument_begin|>",
        re.compile(r"(?P<id>(?:functions\.)?(?P<name>[^\s:<>|]+):\d+)\s*$"),
    ),
    "mistral": Header("[ARGS]", re.compile(r"(?P<name>[\w.-]+)\s*(?:\[CALL_ID\]\s*\w+\s*)?$")),
    "harmony": Header("<|message|>", re.compile(r"^\s*(?P<name>[\w.-]+)")),
}
_LONGEST_HEADER = 512


class HeaderReader(_Streaming):
    """Reads calls written as a name, a separator and JSON arguments; any number of them."""

    def __init__(
        self, markup: Markup, tools: Sequence[Mapping[str, Any]], numbers: CallNumbers
    ) -> None:
        super().__init__(markup, tools, numbers)
        self._format = HEADERS[markup.call_format or ""]
        self._header = ""
        self._named: re.Match[str] | None = None  # a header whose arguments have not started
        self._value: JsonText | None = None

    def _push(self, char: str) -> Iterator[Event]:
        if self._named is not None:
            yield from self._begin(self._named, char)
        elif self._value is None:
            yield from self._push_header(char)
        elif self._value.push(char):
            yield from self._pending()
            self._value = None
        elif self._value.is_cut:
            yield from self._pending()
            yield from self._hand_over(_Skip, char)

    def _push_header(self, char: str) -> Iterator[Event]:
        self._header += char
        end = self._markup.call_end
        if end and self._header.endswith(end):
            yield from self._give_up()
        elif self._header.endswith(self._format.separator):
            header = self._header.removesuffix(self._format.separator)
            self._named = self._format.pattern.search(header)
            if self._named is None:
                yield from self._give_up()
        elif len(self._header) > _LONGEST_HEADER or char == "{":
            yield from self._give_up()

    def _begin(self, named: re.Match[str], char: str) -> Iterator[Event]:
        if char.isspace():
            return
        self._named, self._header = None, ""
        if char != "{":
            yield from self._give_up()
            return
        groups = named.groupdict()
        yield self._numbers.open(groups["name"], call_id=groups.get("id"))
        self._value = JsonText()
        self._value.push(char)

    def _give_up(self) -> Iterator[Event]:
        """What follows is not another call."""
        if self._numbers.count == self.first:
            yield from self._hand_over(SectionReader, "".join(self._seen))
        else:
            yield from self._hand_over(_Skip, self._header)

    def _pending(self) -> Iterator[Event]:
        if self._value is not None and (arguments := self._value.take()):
            yield self._numbers.more(arguments)


def reader_of(
    markup: Markup, tools: Sequence[Mapping[str, Any]], numbers: CallNumbers
) -> CallReader:
    """A reader for the section that starts here."""
    if markup.call_format == "json_tools":
        return JsonReader(markup, tools, numbers)
    if markup.is_bare:
        return BareReader(markup, tools, numbers)
    if markup.call_format in HEADERS:
        return HeaderReader(markup, tools, numbers)
    return SectionReader(markup, tools, numbers)


def _checked(call: Any) -> tuple[str, str, str | None]:
    """(name, arguments as JSON, the model's own id). Raises ValueError, TypeError, LookupError."""
    name, arguments = call["name"], call.get("arguments", {})
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        raise ValueError("a call needs a name and an object of arguments")
    call_id = call.get("id")
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    return name, text, call_id if isinstance(call_id, str) else None

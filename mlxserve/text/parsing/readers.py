"""Readers of one section of calls: what comes between the marker that opens it and its end.

A reader takes text in pieces of any size and gives events; `rest` is what it left behind the
section. Where a format is JSON the arguments stream; elsewhere mlx-lm's parser reads the whole
section at its end. What cannot be read is text, so that nothing a model said is lost.
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

MAX_SECTION = 1 << 20  # characters handed to mlx-lm's parsers, some of which are slower than linear
# Whatever a parser written for well-formed calls may raise on others.
_PARSE_ERRORS = (
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
    SyntaxError,
    RecursionError,
    MemoryError,  # of ast, when it is nested too deep
)


@dataclass(frozen=True, slots=True)
class TextDelta:
    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    text: str


Event: TypeAlias = TextDelta | ReasoningDelta | ToolCallDelta


class CallNumbers:
    """Gives each call of an answer its index and its id."""

    def __init__(self) -> None:
        self.count = 0

    def open(self, name: str, arguments: str = "", call_id: str | None = None) -> ToolCallDelta:
        self.count += 1
        call_id = call_id or f"call_{uuid4().hex[:24]}"
        return ToolCallDelta(self.count - 1, call_id, name, arguments)

    def more(self, arguments: str) -> ToolCallDelta:
        return ToolCallDelta(self.count - 1, arguments=arguments)


class CallReader(ABC):
    """One section. `rest` is None until its end was seen."""

    def __init__(
        self, markup: Markup, tools: Sequence[Mapping[str, Any]], numbers: CallNumbers
    ) -> None:
        self.rest: str | None = None
        self.first = numbers.count  # the index of its first call
        self._markup = markup
        self._tools = tools
        self._numbers = numbers

    @abstractmethod
    def push(self, text: str) -> Iterator[Event]: ...

    @abstractmethod
    def finish(self) -> Iterator[Event]:
        """The answer is over."""

    def _parsed(self, section: str) -> Iterator[Event]:
        """The calls of a whole section as mlx-lm reads them, or the section as text."""
        parse = self._markup.parse_call
        try:
            if parse is None or len(section) > MAX_SECTION:
                raise ValueError("nobody reads it")
            found = parse(section, list(self._tools))
            calls = [_checked(call) for call in (found if isinstance(found, list) else [found])]
        except _PARSE_ERRORS:
            if section.strip():
                yield TextDelta(section)
            return
        for name, arguments, call_id in calls:
            yield self._numbers.open(name, arguments, call_id)


class SectionReader(CallReader):
    """Any format: waits for the end of the section."""

    def __init__(
        self, markup: Markup, tools: Sequence[Mapping[str, Any]], numbers: CallNumbers
    ) -> None:
        super().__init__(markup, tools, numbers)
        self._pieces: list[str] = []
        self._tail = ""  # could be the beginning of the end

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
    """The rest of a section that has been read."""

    def _parsed(self, section: str) -> Iterator[Event]:  # noqa: ARG002
        yield from ()


class _Streaming(CallReader):
    """Reads character by character until another reader takes over."""

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
        """Arguments that have come and were not handed out."""


class JsonReader(_Streaming):
    """`{"name": ..., "arguments": {...}}`: one call, and the closing marker."""

    def __init__(
        self, markup: Markup, tools: Sequence[Mapping[str, Any]], numbers: CallNumbers
    ) -> None:
        super().__init__(markup, tools, numbers)
        self._call = JsonCall()
        self._is_named = False

    def _push(self, char: str) -> Iterator[Event]:
        self._call.push(char)
        if self._call.name and not self._is_named:
            self._is_named = True
            yield self._numbers.open(self._call.name)
        if self._is_named and (self._call.is_done or self._call.is_broken):
            yield from self._pending()
            yield from self._hand_over(_Skip, char)
        elif self._call.is_broken:
            yield from self._hand_over(SectionReader, "".join(self._seen))

    def _pending(self) -> Iterator[Event]:
        if self._is_named and (arguments := self._call.take()):
            yield self._numbers.more(arguments)


class BareReader(JsonReader):
    """A call of one of the tools without any marker; whatever else it is, is text."""

    def _push(self, char: str) -> Iterator[Event]:
        self._call.push(char)
        if self._call.name and not self._is_named:
            self._is_named = self._call.name in self._names()
            if self._is_named:
                yield self._numbers.open(self._call.name)
        if self._is_named and (self._call.is_done or self._call.is_broken):
            yield from self._pending()
            yield from self._hand_over(_Skip, char)
        elif self._call.is_broken or (self._call.name and not self._is_named):
            self.rest = "".join(self._seen)

    def finish(self) -> Iterator[Event]:
        if not self._is_named and self._seen:
            yield TextDelta("".join(self._seen))

    def _names(self) -> set[str]:
        return {tool["function"]["name"] for tool in self._tools}


@dataclass(frozen=True, slots=True)
class Header:
    """How a format writes the name before a call's arguments.

    pattern: finds the name, and where the format has one the call's id, before the separator
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
    """A name, a separator, arguments as JSON; any number of them."""

    def __init__(
        self, markup: Markup, tools: Sequence[Mapping[str, Any]], numbers: CallNumbers
    ) -> None:
        super().__init__(markup, tools, numbers)
        self._format = HEADERS[markup.call_format or ""]
        self._header = ""
        self._named: re.Match[str] | None = None  # a header whose arguments have not begun
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
        """What comes now is no further call."""
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
    """A reader of the section that begins now."""
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

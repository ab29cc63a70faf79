"""CallSyntax: the common part of the readers of all syntaxes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar
from uuid import uuid4

from mlxserve.text.parsing.cursor import Cursor, Cut, Reading
from mlxserve.text.parsing.formats import CallFormat
from mlxserve.text.parsing.json_text import JsonText, well_formed_json
from mlxserve.text.parsing.turn import ToolCallDelta
from mlxserve.text.parsing.values import Malformed


class CallNumbers:
    """Numbers an answer's calls and gives each an id; models repeat theirs."""

    def __init__(self) -> None:
        self.count = 0
        self._ids: set[str] = set()

    def open(self, name: str, arguments: str = "", call_id: str | None = None) -> ToolCallDelta:
        self.count += 1
        if not call_id or call_id in self._ids:
            call_id = f"call_{uuid4().hex[:24]}"
        self._ids.add(call_id)
        return ToolCallDelta(self.count - 1, call_id, name, arguments)

    def more(self, arguments: str) -> ToolCallDelta:
        return ToolCallDelta(self.count - 1, arguments=arguments)


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A section of calls.

    schemas: of the tools' arguments, by the tools' names
    is_certain: a marker said that calls follow; otherwise only calls to the tools are calls
    name: of the tool, if the header of a message had it: the section is its arguments
    """

    row: CallFormat
    schemas: Mapping[str, Mapping[str, Any]]
    numbers: CallNumbers
    is_certain: bool = True
    name: str | None = None
    cursor: Cursor = field(default_factory=Cursor)


class CallSyntax(ABC):
    """Reads calls of one syntax."""

    debris: ClassVar[str] = ""  # characters between calls that mean nothing
    begins: ClassVar[str] = ""  # the first character of a call

    def __init__(self, section: Section) -> None:
        self.section, self.row, self.cursor = section, section.row, section.cursor
        self.closer = section.row.call.partition("$arguments")[2].strip()  # end of a call

    def read_first(self) -> Reading[None]:
        yield from self.read_call()

    @abstractmethod
    def read_call(self) -> Reading[None]:
        """Read one call. Raises Malformed for anything else, and Cut."""

    def may_follow(self) -> Reading[bool]:
        """True if what comes next may be another call."""
        return bool(self.begins) and (yield from self.cursor.char()) == self.begins

    def ends_call(self, at: int, *others: str) -> Reading[bool | None]:
        """True if the answer or the section goes on where a call ends; None if text follows.

        others: what may begin another call, beside the markers of the row
        """
        try:
            at, _ = yield from self.cursor.ahead(at)
        except Cut:
            return True
        begins = (*self.row.ends, *self.row.starts, *others)
        return (yield from self.cursor.sees_any(begins, at)) or None

    def check(self, name: str) -> None:
        """Raises Malformed for a name that makes this not a call."""
        if not name or (not self.section.is_certain and name not in self.section.schemas):
            raise Malformed

    def emit(self, name: str, arguments: str, call_id: str | None = None) -> Reading[None]:
        """Emit a complete call."""
        self.check(name)
        yield self.section.numbers.open(name, well_formed_json(arguments), call_id)
        self.cursor.mark()

    def stream(self, name: str, call_id: str | None, begun: str = "") -> Reading[None]:
        """Emit a call while its arguments, the JSON value that comes next, are read."""
        self.check(name)
        value = JsonText()
        is_done = bool(begun) and value.push(begun)
        is_open = False
        try:
            while not is_done:
                if self.cursor.is_empty and (text := value.take()):
                    yield self._piece(text, name, call_id, is_open=is_open)
                    is_open = True
                char = yield from self.cursor.char()
                is_done = value.push(char)
                self.cursor.take(1)
        except (Malformed, Cut):
            if text := value.finish():
                yield self._piece(text, name, call_id, is_open=is_open)
            raise
        yield self._piece(value.take(), name, call_id, is_open=is_open)

    def _piece(self, text: str, name: str, call_id: str | None, *, is_open: bool) -> ToolCallDelta:
        self.cursor.mark()
        numbers = self.section.numbers
        return numbers.more(text) if is_open else numbers.open(name, text, call_id)

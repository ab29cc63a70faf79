"""A section of calls: the text from its opening marker to its end.

    │ first call │ debris │ next call │ debris, end marker │ rest
    ^ mark       ^ mark             ^ mark

A call is an event once it is complete; only arguments in JSON stream. What is not a call becomes
text, from the last mark on, so that no output of the model is lost.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from mlxserve.text.parsing.cursor import Cut, Reading
from mlxserve.text.parsing.elements import ElementSyntax, TagSyntax
from mlxserve.text.parsing.formats import FUNCTIONS, Syntax
from mlxserve.text.parsing.json_calls import HeadedSyntax, JsonSyntax, MessageSyntax
from mlxserve.text.parsing.python_calls import ObjectSyntax, PythonSyntax
from mlxserve.text.parsing.syntax import CallSyntax, Section
from mlxserve.text.parsing.turn import Event
from mlxserve.text.parsing.values import Malformed

_SYNTAXES: Mapping[Syntax, type[CallSyntax]] = {
    Syntax.JSON: JsonSyntax,
    Syntax.HEADED: HeadedSyntax,
    Syntax.ELEMENTS: ElementSyntax,
    Syntax.TAGS: TagSyntax,
    Syntax.PYTHON: PythonSyntax,
    Syntax.OBJECT: ObjectSyntax,
}


class SectionReader:
    """Reads one section. `rest` is None until its end was seen."""

    def __init__(self, section: Section) -> None:
        self.rest: str | None = None
        # Index of the section's first call.
        self.first = section.numbers.count
        self._section, self._row, self._cursor = section, section.row, section.cursor
        self._reading = self._read()

    def push(self, text: str) -> Iterator[Event]:
        self._cursor.feed(text)
        yield from self._advance()

    def finish(self) -> Iterator[Event]:
        """End the answer."""
        self._cursor.is_whole = True
        yield from self._advance()

    def _advance(self) -> Iterator[Event]:
        for event in self._reading:
            if event is None:
                return
            yield event
        self.rest = self._cursor.rest()

    def _read(self) -> Reading[None]:
        try:
            syntax = yield from self._syntax()
            yield from syntax.read_first()
            while (yield from self._goes_on(syntax)):
                yield from syntax.read_call()
        except (Malformed, Cut, RecursionError):
            # What was taken since the last mark is text.
            pass

    def _syntax(self) -> Reading[CallSyntax]:
        """Choose the reader of this section: models also write calls in other syntaxes."""
        section, row = self._section, self._row
        if section.name is not None:
            return MessageSyntax(section)
        yield from self._cursor.skip()
        if (yield from self._is_json()):
            return JsonSyntax(section)
        if FUNCTIONS.call != row.call and (yield from self._cursor.sees("<function=")):
            row = replace(
                row,
                call=FUNCTIONS.call,
                parameter=FUNCTIONS.parameter,
                starts=row.starts or FUNCTIONS.starts,
                block=("", ""),
            )
            return ElementSyntax(replace(section, row=row))
        return _SYNTAXES[row.syntax](section)

    def _is_json(self) -> Reading[bool]:
        char = yield from self._cursor.char()
        if char == "[" and self._row.syntax is Syntax.PYTHON:
            _, char = yield from self._cursor.ahead(1)
            return char == "{"
        return char == "{" or (char == "[" and self._row.syntax is not Syntax.OBJECT)

    def _goes_on(self, syntax: CallSyntax) -> Reading[bool]:
        """True if another call follows the one that was read."""
        cursor = self._cursor
        cursor.mark()
        yield from cursor.skip()
        if syntax.closer and (yield from cursor.accepts(syntax.closer)):
            cursor.mark()
            yield from cursor.skip()
        while (yield from cursor.char()) in syntax.debris:
            cursor.take(1)
            cursor.mark()
            yield from cursor.skip()
        if (yield from cursor.accepts_any(self._row.ends)):
            cursor.mark()
            return False
        is_next = yield from cursor.sees_any(self._row.starts)
        return not is_next and (yield from syntax.may_follow())

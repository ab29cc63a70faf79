"""TurnParser: splits an answer's text into text, thinking and tool calls while it streams.

Text that may turn out to be a marker is held back until that is known, and so is what may be the end
of a part, which belongs to the markup unless text goes on after it. What looked like a call or a
header and was none is given back as text, markers and all. The joined events do not depend on how the
input is cut into pieces.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterator, Sequence
from typing import NamedTuple

from mlxserve.text.parsing.markers import find_marker
from mlxserve.text.parsing.markup import Markup, Part
from mlxserve.text.parsing.places import Edge, MarkerPlace, edges_of
from mlxserve.text.parsing.readers import SectionReader
from mlxserve.text.parsing.syntax import CallNumbers, Section
from mlxserve.text.parsing.turn import (
    AssistantTurn,
    Event,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
)
from mlxserve.text.parsing.values import schemas_of

_SEAM = "\n\n"  # between parts of one kind that were apart


class _Left(NamedTuple):
    """The part that a header interrupts, and the marker that did."""

    part: Part
    edge: Edge


class TurnParser:
    """Splits text into events. `is_over` becomes true after the last call that is allowed."""

    def __init__(self, markup: Markup, turn: AssistantTurn, *, is_thinking: bool = False) -> None:
        self._markup = markup
        self._turn = turn
        self._row = markup.format
        self._edges = edges_of(markup, may_call=turn.may_call)
        self._markers = {key: tuple(edges) for key, edges in self._edges.items()}
        self._part = Part.THINKING if is_thinking else markup.first
        self._place = MarkerPlace.BEGIN
        self._numbers = CallNumbers()
        self._reader: SectionReader | None = None
        # The marker before the section of calls, which is text if the section has none.
        self._opener = ""
        self._left: _Left | None = None
        # A call began inside thinking.
        self._is_in_doubt = False
        # May be the beginning of a marker.
        self._held = ""
        # May be the end of a part: white space, and markers that end a text.
        self._tail = ""
        # No text since this part was entered.
        self._is_fresh = self._part is Part.THINKING
        # The line so far has a backtick that is not closed.
        self._is_quoted = False
        self._shown: set[Part] = set()
        self.is_over = False

    @property
    def is_thinking(self) -> bool:
        return self._part is Part.THINKING

    @property
    def tokens(self) -> frozenset[int]:
        """Special tokens that must appear in the input text; all others must not."""
        hidden = frozenset() if self._turn.may_call else self._markup.call_tokens
        return self._markup.tokens - hidden

    @property
    def num_calls(self) -> int:
        return self._numbers.count

    def push(self, text: str) -> Iterator[Event]:
        rest: str | None = text
        while rest and not self.is_over:
            if self._reader is not None:
                rest = yield from self._read(rest)
            elif self._is_in_doubt:
                rest = yield from self._wait_for_end(rest)
            elif self._part is Part.HEADER:
                rest = yield from self._read_header(rest)
            else:
                rest = yield from self._scan(rest)

    def finish(self) -> Iterator[Event]:
        """End the answer: emit held-back text as plain text."""
        while not self.is_over and (self._reader is not None or self._is_in_doubt):
            yield from self._settle_doubt() if self._is_in_doubt else self._end_calls()
        if self.is_over:
            return
        if self._part is Part.HEADER:
            self._end_header()
        held, self._held = self._held, ""
        yield from self._show(held)
        if self._part is Part.TEXT and not self._numbers.count and self._tail.isspace():
            yield TextDelta(self._tail)

    # ---- markers

    def _scan(self, text: str) -> Generator[Event, None, str | None]:
        """Look for the next marker; returns the text after it."""
        self._held += text
        at, edge = self._find()
        text, rest = self._held[:at], self._held[at:]
        if edge is None:
            self._held = rest
            yield from self._show(text)
            return None
        self._held = ""
        yield from self._show(text)
        return self._cross(edge, rest.removeprefix(edge.marker))

    def _find(self) -> tuple[int, Edge | None]:
        """Return (where the next marker begins, its edge), or (length without a marker, None)."""
        held = self._held
        if self._place is not MarkerPlace.INSIDE and not held.isspace():
            if (match := self._find_at_begin()) is not None:
                return match
            self._place = MarkerPlace.INSIDE
        key = self._part, MarkerPlace.INSIDE
        at, marker = find_marker(held, self._markers[key])
        return at, self._edges[key].get(marker)

    def _find_at_begin(self) -> tuple[int, Edge | None] | None:
        """Like `_find` with the markers of this place; None if the text begins with none."""
        key = self._part, self._place
        begin = len(self._held) - len(self._held.lstrip())
        begun = self._held[begin:]
        if any(marker != begun and marker.startswith(begun) for marker in self._markers[key]):
            return begin, None
        marker = max(filter(begun.startswith, self._markers[key]), key=len, default=None)
        return None if marker is None else (begin, self._edges[key][marker])

    def _cross(self, edge: Edge, rest: str) -> str:
        """Follow a marker's edge; return the text that is read there."""
        if edge.to is Part.CALL and self._part is Part.THINKING:
            self._is_in_doubt = True
            return edge.marker + rest
        if edge.is_end:
            self._tail += edge.marker
            self._place = MarkerPlace.END
        elif edge.to is Part.CALL:
            self._enter_call("" if edge.is_kept else edge.marker)
        elif edge.to is Part.HEADER:
            self._left = _Left(self._part, edge)
            self._part = Part.HEADER
        elif edge.to is not None:
            self._enter(edge.to)
        return edge.marker + rest if edge.is_kept else rest

    def _enter(self, part: Part) -> None:
        self._part, self._place = part, MarkerPlace.BEGIN
        self._tail = ""
        self._is_fresh, self._is_quoted = True, False

    # ---- calls inside thinking

    def _wait_for_end(self, text: str) -> Generator[Event, None, str | None]:
        """Hold back what begins as a call inside thinking: it was a thought if text follows.

        Models also start a call without closing their thinking, or close it after the call, and
        then end their answer.
        """
        assert self._markup.thinking is not None
        end = self._markup.thinking[1]
        begin = max(len(self._held.rstrip()) - len(end), 0)
        self._held += text
        at = self._held.find(end, begin)
        if at < 0 or not self._held[at + len(end) :].strip():
            return None
        thought, rest = self._held[:at], self._held[at:]
        self._held, self._is_in_doubt = "", False
        yield from self._show(thought)
        return rest

    def _settle_doubt(self) -> Iterator[Event]:
        """Resolve calls in thinking that no text follows: they were meant if they can be read.

        Between calls that were meant there is no text.
        """
        assert self._markup.thinking is not None
        thought, end, _ = self._held.partition(self._markup.thinking[1])
        self._held, self._is_in_doubt = "", False
        parser, num_calls = TurnParser(self._markup, self._turn), self._numbers.count
        parser._numbers, parser._shown = self._numbers, self._shown
        events = [*parser.push(thought), *parser.finish()]
        places = [at for at, event in enumerate(events) if isinstance(event, ToolCallDelta)]
        if not places or (end and _text_of(events[places[0] : places[-1]]).strip()):
            self._numbers.count = num_calls
            yield from self._show(thought)
            return
        after = events[places[0] :]
        yield from self._show(_text_of(events if end else events[: places[0]]))
        self._enter(Part.TEXT)
        yield from (e for e in after if not end or isinstance(e, ToolCallDelta))
        self.is_over = parser.is_over

    # ---- calls

    def _enter_call(self, opener: str, *, name: str | None = None) -> None:
        """Read calls from here: after a marker, or in the message for a tool."""
        assert self._row is not None
        self._opener = opener
        is_quoted = self._is_quoted and "\n" not in self._tail
        section = Section(
            row=self._row,
            schemas=schemas_of(self._turn.tools),
            numbers=self._numbers,
            is_certain=name is not None or (bool(opener) and not is_quoted),
            name=name,
        )
        self._reader = SectionReader(section)

    def _read(self, text: str) -> Generator[Event, None, str | None]:
        """Pass the text to the reader of calls; returns the text after the section."""
        reader = self._reader
        assert reader is not None
        yield from self._limited(reader.push(text))
        if reader.rest is None or self.is_over:
            return None
        self._reader = None
        if self._numbers.count > reader.first:
            self.is_over = not self._turn.parallel_tool_calls
            self._leave_calls()
            return reader.rest
        # The marker, or its first character, must not be found again.
        text = self._opener + reader.rest
        cut = len(self._opener) or len(text) - len(text.lstrip()) + 1
        yield from self._show(text[:cut])
        return text[cut:]

    def _end_calls(self) -> Iterator[Event]:
        """End the answer in a section. What is no call is text, and not searched for others."""
        reader = self._reader
        assert reader is not None
        yield from self._limited(reader.finish())
        self._reader = None
        if self._numbers.count > reader.first:
            self._leave_calls()
            yield from self.push(reader.rest or "")
        else:
            self._held = self._opener + (reader.rest or "")

    def _leave_calls(self) -> None:
        # A marker did end the text.
        self._tail = re.sub(r"\S+", "", self._tail)
        self._place = MarkerPlace.AFTER_CALL
        if self._markup.first is Part.HEADER:
            self._part, self._left = Part.HEADER, None

    def _limited(self, events: Iterator[Event]) -> Iterator[Event]:
        """End the turn at a second call, and drop it, if only one is allowed."""
        for event in events:
            if not self._turn.parallel_tool_calls and self._numbers.count > 1:
                self._numbers.count = 1
                self.is_over = True
                return
            yield event

    # ---- headers of messages

    def _read_header(self, text: str) -> Generator[Event, None, str | None]:
        """Read the next message's header; returns the text after it."""
        assert self._row is not None
        assert self._row.channels is not None
        channels = self._row.channels
        self._held += text
        header, message, rest = channels.split(self._held)
        tools = schemas_of(self._turn.tools if self._turn.may_call else ())
        if not channels.may_be(header, tools, is_whole=bool(message)):
            return (yield from self._refuse_header())
        if not message:
            return None
        self._held, self._left = "", None
        is_thinking, name = channels.read(header, message, tools)
        self._enter(Part.THINKING if is_thinking else Part.TEXT)
        if name is not None:
            self._enter_call(f"{header}{message}" if channels.texts else "", name=name)
        return f"{message}{rest}" if message in self._row.starts else rest

    def _refuse_header(self) -> Generator[Event, None, str]:
        """Continue after text that is no header: a message without one, or more text.

        Thinking does not go on after a marker that ends it.
        """
        held, self._held = self._held, ""
        left, self._left = self._left, None
        if left is None or (left.part is Part.THINKING and not left.edge.is_kept):
            self._enter(Part.TEXT)
            return held
        self._part = left.part
        yield from self._show(left.edge.marker)
        return held.removeprefix(left.edge.marker) if left.edge.is_kept else held

    def _end_header(self) -> None:
        """End the answer in a possible header, which is dropped after the end of a message."""
        assert self._row is not None
        assert self._row.channels is not None
        left, opens = self._left, self._row.channels.opens
        if left is not None and left.edge.is_kept:
            self._part = left.part
        elif left is not None or self._held.lstrip().startswith(opens):
            self._held = ""
        else:
            self._part = Part.TEXT

    # ---- text

    def _show(self, text: str) -> Iterator[Event]:
        """Emit this part's text, except a possible end marker."""
        if self._part not in (Part.TEXT, Part.THINKING) or not text:
            return
        has_end = bool(self._markers[self._part, MarkerPlace.BEGIN])
        if has_end and text.isspace():
            self._tail += text
            return
        text = self._tail + text
        if self._is_fresh or (self._part not in self._shown and self._numbers.count):
            text = text.lstrip()
        shown = text.rstrip() if has_end else text
        self._tail = text[len(shown) :]
        if not shown:
            return
        if self._is_fresh and self._part in self._shown:
            shown = _SEAM + shown
        self._is_fresh = False
        self._place = MarkerPlace.INSIDE
        self._shown.add(self._part)
        if "`" in text or "\n" in text:
            self._note_backticks(text)
        yield TextDelta(shown) if self._part is Part.TEXT else ReasoningDelta(shown)

    def _note_backticks(self, text: str) -> None:
        _, new_line, line = text.rpartition("\n")
        is_odd = line.count("`") % 2 == 1
        self._is_quoted = is_odd if new_line else is_odd != self._is_quoted


def _text_of(events: Sequence[Event]) -> str:
    return "".join(event.text for event in events if not isinstance(event, ToolCallDelta))

"""TurnParser: splits an answer's text into text, thinking and tool calls while it streams.

Text that may turn out to be a marker is held back until that is known, and so is white space
before the markers, which belongs to the markup unless text goes on after a call. The joined events
do not depend on how the input is cut into pieces.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import NamedTuple

from mlxserve.text.parsing.formats import Syntax
from mlxserve.text.parsing.markup import Markup, Part
from mlxserve.text.parsing.overlap import overlap
from mlxserve.text.parsing.readers import SectionReader
from mlxserve.text.parsing.syntax import CallNumbers
from mlxserve.text.parsing.turn import AssistantTurn, Event, ReasoningDelta, TextDelta

_LONGEST_HEADER = 512
# What may begin a call without a marker.
_BARE = {
    Syntax.JSON: ('{"name"', '[{"name"'),
    Syntax.PYTHON: ("[",),
    Syntax.OBJECT: ("call:",),
}
_SEAM = "\n\n"  # between parts of one kind that were apart


class _Edge(NamedTuple):
    """A marker that ends a part, and the part that follows.

    is_kept: the marker is also the beginning of what follows
    """

    marker: str
    to: Part
    is_kept: bool = False


class TurnParser:
    """Text to events. `is_over` becomes true after the last call that the request allows."""

    def __init__(self, markup: Markup, turn: AssistantTurn, *, is_thinking: bool = False) -> None:
        self._markup = markup
        self._turn = turn
        self._row = markup.format
        self._edges = _edges(markup, may_call=turn.may_call)
        self._markers = {
            part: tuple(e.marker for e in found) for part, found in self._edges.items()
        }
        self._part = Part.THINKING if is_thinking else markup.first
        self._numbers = CallNumbers()
        self._reader: SectionReader | None = None
        self._entry: _Edge | None = None  # which opened the section of calls
        self._is_in_doubt = False  # a call began inside thinking
        self._held = ""  # may be the beginning of a marker
        self._blanks = ""  # white space that may be at the end of a part
        self._is_fresh = self._part is Part.THINKING  # no text of this part was emitted yet
        self._shown: set[Part] = set()
        self.is_over = False
        self._may_be_bare = self._part is Part.TEXT  # the whole text may be a call

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
                rest = self._read_header(rest)
            elif self._may_be_bare and self._begins_bare(rest):
                self._enter_call()
            else:
                rest = yield from self._scan(rest)

    def finish(self) -> Iterator[Event]:
        """End of the answer: emit what was held back as plain text."""
        if self._is_in_doubt:
            held, self._held, self._is_in_doubt = self._held, "", False
            self._enter(Part.TEXT)
            yield from self.push(held)
        if self.is_over:
            return
        if self._reader is not None:
            yield from self._limited(self._reader.finish())
            if self.is_over:
                return
            # What is not a call is text, markers and all.
            self._is_fresh &= self._entry is None or self._numbers.count > self._reader.first
            self._held, self._reader = self._reader.rest or "", None
        held, self._held = self._held, ""
        if self._part is Part.HEADER:
            channels = self._row.channels if self._row is not None else None
            if channels is None or not held.lstrip().startswith(channels.opens):
                self._part = Part.TEXT
        yield from self._show(held)
        if self._part is Part.TEXT and not self._numbers.count and self._blanks:
            yield TextDelta(self._blanks)

    def _scan(self, text: str) -> Generator[Event, None, str | None]:
        """Look for the next marker; returns the text after it."""
        self._held += text
        edges = self._edges.get(self._part, ())
        found = [(at, -len(e.marker), e) for e in edges if (at := self._held.find(e.marker)) >= 0]
        if not found:
            keep = overlap(self._held, self._markers.get(self._part, ()))
            cut = len(self._held) - keep
            text, self._held = self._held[:cut], self._held[cut:]
            yield from self._show(text)
            return None
        at, _, edge = min(found, key=lambda item: item[:2])
        text, rest = self._held[:at], self._held[at + len(edge.marker) :]
        self._held = ""
        yield from self._show(text)
        if edge.to is Part.CALL and self._part is Part.THINKING:
            self._is_in_doubt = True
            return edge.marker + rest
        if edge.to is Part.CALL:
            self._enter_call(edge)
        elif not (edge.to is self._part and edge.marker in self._markup.call_ends):
            self._enter(edge.to)
        return edge.marker + rest if edge.is_kept else rest

    def _wait_for_end(self, text: str) -> Generator[Event, None, str | None]:
        """Hold back what begins as a call inside thinking: if the thinking ends, it was a thought.

        Models also start a call without closing their thinking, and then end their answer.
        """
        assert self._markup.thinking is not None
        end = self._markup.thinking[1]
        begin = max(len(self._held) - len(end), 0)
        self._held += text
        at = self._held.find(end, begin)
        if at < 0:
            return None
        thought, rest = self._held[:at], self._held[at:]
        self._held, self._is_in_doubt = "", False
        yield from self._show(thought)
        return rest

    def _enter(self, part: Part) -> None:
        self._part = part
        self._blanks = ""
        self._is_fresh = True
        self._may_be_bare = self._may_be_bare or (part is Part.TEXT and part not in self._shown)

    def _enter_call(self, edge: _Edge | None = None, *, name: str | None = None) -> None:
        """Read calls from here: after a marker, or the message for a tool, or else perhaps one."""
        assert self._row is not None
        self._may_be_bare = False
        self._entry = edge
        is_certain = name is not None or (edge is not None and not edge.is_kept)
        self._reader = SectionReader(
            self._row, self._turn.tools, self._numbers, is_certain=is_certain, name=name
        )

    def _begins_bare(self, text: str) -> bool:
        """Whether a call without a marker may start here: nothing but white space came before."""
        row = self._row
        if row is None or not row.is_bare or self._held:
            return False
        is_text = self._part is Part.TEXT and self._turn.may_call
        return is_text and row.syntax is Syntax.JSON and text.lstrip()[:1] in ("{", "[")

    def _read_header(self, text: str) -> str | None:
        """Find out what the next message is; returns the text after its header."""
        assert self._row is not None
        assert self._row.channels is not None
        channels = self._row.channels
        self._held += text
        at = self._held.find(channels.message)
        begun = self._held.lstrip()
        may_open = any(o.startswith(begun) or begun.startswith(o) for o in channels.opens)
        if (begun and not may_open) or at > _LONGEST_HEADER:
            return self._leave_header(Part.TEXT, self._held)
        if at < 0:
            is_long = len(self._held) > _LONGEST_HEADER + len(channels.message)
            return self._leave_header(Part.TEXT, self._held) if is_long else None
        header, rest = self._held[:at], self._held[at + len(channels.message) :]
        tools = frozenset(str(tool["function"]["name"]) for tool in self._turn.tools)
        part, name = channels.read(header, tools if self._turn.may_call else None)
        if name is not None:
            self._leave_header(Part.TEXT, "")
            self._enter_call(name=name)
            return rest
        return self._leave_header(Part.THINKING if part else Part.TEXT, rest)

    def _leave_header(self, part: Part, rest: str) -> str:
        self._held = ""
        self._enter(part)
        return rest

    def _read(self, text: str) -> Generator[Event, None, str | None]:
        """Pass the text to the reader of calls; returns the text after the section."""
        reader = self._reader
        assert reader is not None
        yield from self._limited(reader.push(text))
        rest = reader.rest
        if rest is None or self.is_over:
            return None
        self._reader = None
        has_called = self._numbers.count > reader.first
        self.is_over = self._numbers.count > 0 and not self._turn.parallel_tool_calls
        if has_called and self._part is not Part.TEXT:
            self._enter(Part.TEXT)
        if has_called and self._markup.first is Part.HEADER:
            self._part = Part.HEADER
        elif not has_called and self._entry is not None:
            self._is_fresh = False
            if self._entry.is_kept:  # not to find it again
                yield from self._show(rest[:1])
                rest = rest[1:]
        return rest

    def _limited(self, events: Iterator[Event]) -> Iterator[Event]:
        """If only one call is allowed, end the turn at the second one and drop it."""
        for event in events:
            if not self._turn.parallel_tool_calls and self._numbers.count > 1:
                self._numbers.count = 1
                self.is_over = True
                return
            yield event

    def _show(self, text: str) -> Iterator[Event]:
        """Emit text of this part without the white space at its ends."""
        if self._part not in (Part.TEXT, Part.THINKING) or not text:
            return
        text = self._blanks + text
        if self._is_fresh or (self._part not in self._shown and self._numbers.count):
            text = text.lstrip()
        shown = text.rstrip() if self._edges.get(self._part) else text
        self._blanks = text[len(shown) :]
        if not shown:
            return
        if self._is_fresh and self._part in self._shown:
            shown = _SEAM + shown
        self._is_fresh = False
        self._may_be_bare = False
        self._shown.add(self._part)
        yield TextDelta(shown) if self._part is Part.TEXT else ReasoningDelta(shown)


def _edges(markup: Markup, *, may_call: bool) -> dict[Part, tuple[_Edge, ...]]:
    """The markers that end text and thinking, and what follows them."""
    row = markup.format
    text: list[_Edge] = []
    thinking: list[_Edge] = []
    if row is not None and row.channels is not None:
        ends = [_Edge(end, Part.HEADER) for end in row.channels.ends]
        text += ends
        thinking += ends
    if markup.thinking is not None:
        begin, end = markup.thinking
        # A closing marker without an opening one ends nothing.
        text += [_Edge(begin, Part.THINKING), _Edge(end, Part.TEXT)]
        thinking.append(_Edge(end, Part.TEXT))
    if row is not None:
        text += [_Edge(marker, Part.TEXT) for marker in row.hidden]
    if row is not None and may_call:
        starts = [_Edge(start, Part.CALL) for start in row.starts]
        text += starts
        thinking += starts if markup.thinking is not None else []
        if not row.channels:
            text += [_Edge(end, Part.TEXT) for end in markup.call_ends]
        begins = ["<function="]
        if row.is_bare:
            begins += _BARE[row.syntax]
        text += [
            _Edge(begin, Part.CALL, is_kept=True) for begin in begins if begin not in row.starts
        ]
    return {Part.TEXT: tuple(text), Part.THINKING: tuple(thinking)}

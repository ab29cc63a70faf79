"""TurnParser: splits an answer's text into text, thinking and tool calls while it streams.

Text that may turn out to be a marker is held back until that is known, and so is white space
around the parts, which belongs to the markup. The joined events do not depend on how the input is
cut into pieces.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator

from mlxserve.text.parsing.markup import Markup, Part
from mlxserve.text.parsing.overlap import overlap
from mlxserve.text.parsing.readers import (
    CallNumbers,
    CallReader,
    Event,
    ReasoningDelta,
    TextDelta,
    reader_of,
)
from mlxserve.text.parsing.turn import AssistantTurn


class TurnParser:
    """Text to events. `is_over` becomes true after the last call that the request allows."""

    def __init__(self, markup: Markup, turn: AssistantTurn, *, is_thinking: bool = False) -> None:
        self._markup = markup
        self._turn = turn
        self._edges = {
            part: tuple((m, to) for m, to in found if to is not Part.CALL or turn.may_call)
            for part, found in markup.edges.items()
        }
        self._markers = {part: tuple(m for m, _ in found) for part, found in self._edges.items()}
        self._part = Part.THINKING if is_thinking else markup.first
        self._numbers = CallNumbers()
        self._reader: CallReader | None = None
        self._held = ""  # may be the beginning of a marker
        self._blanks = ""  # may be the white space before one
        self._is_fresh = self._part is Part.THINKING  # no text of this part was emitted yet
        self.is_over = False
        if markup.is_bare and turn.may_call:
            self._enter(Part.CALL)

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
            rest = yield from self._read(rest) if self._reader else self._scan(rest)

    def finish(self) -> Iterator[Event]:
        """End of the answer: emit what was held back as plain text."""
        if self.is_over:
            return
        if self._reader is not None:
            yield from self._limited(self._reader.finish())
        held, self._held = self._held, ""
        yield from self._show(held)
        if self._part is Part.TEXT and not self._numbers.count and self._blanks:
            yield TextDelta(self._blanks)

    def _scan(self, text: str) -> Generator[Event, None, str | None]:
        """Look for the next marker; returns the text after it."""
        self._held += text
        edges = self._edges.get(self._part, ())
        found = [(at, -len(m), m, to) for m, to in edges if (at := self._held.find(m)) >= 0]
        if not found:
            keep = overlap(self._held, self._markers.get(self._part, ()))
            cut = len(self._held) - keep
            text, self._held = self._held[:cut], self._held[cut:]
            yield from self._show(text)
            return None
        at, _, marker, to = min(found, key=lambda item: item[:2])
        text, rest = self._held[:at], self._held[at + len(marker) :]
        self._held = ""
        yield from self._show(text)
        self._enter(to)
        return rest

    def _enter(self, part: Part) -> None:
        self._part = part
        self._blanks = ""
        self._is_fresh = True
        if part is Part.CALL:
            self._reader = reader_of(self._markup, self._turn.tools, self._numbers)

    def _read(self, text: str) -> Generator[Event, None, str | None]:
        """Pass the text to the reader of calls; returns the text after the section."""
        assert self._reader is not None
        yield from self._limited(self._reader.push(text))
        rest, first = self._reader.rest, self._reader.first
        if rest is not None and not self.is_over:
            self._reader = None
            if self._numbers.count == first and self._markup.is_bare:
                self._part, self._is_fresh = Part.TEXT, False
                return rest
            self._part = Part.TEXT if self._markup.first is Part.TEXT else Part.HEADER
            self.is_over = self._numbers.count > 0 and not self._turn.parallel_tool_calls
            self._is_fresh = self._numbers.count > first
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
        if self._is_fresh:
            text = text.lstrip()
        stripped = text.rstrip() if self._edges.get(self._part) else text
        self._blanks = text[len(stripped) :]
        if not stripped:
            return
        self._is_fresh = False
        yield TextDelta(stripped) if self._part is Part.TEXT else ReasoningDelta(stripped)

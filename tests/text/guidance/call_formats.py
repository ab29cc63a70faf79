"""Every call format, with two tools, and answers drawn from a grammar's masks."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

from mlxserve.core.sampling_params import Structure, StructureKind
from mlxserve.text.guidance.grammars import Grammars
from mlxserve.text.guidance.guide import AnswerGuide
from mlxserve.text.guidance.matcher_host import RowOutcome
from mlxserve.text.guidance.matchers import Matcher
from mlxserve.text.parsing.formats import FORMATS
from mlxserve.text.parsing.markup import Markup
from mlxserve.text.parsing.turn import Event, ToolCall, ToolCallDelta, join_calls
from mlxserve.text.tokenizer import Tokenizer
from tests.text.learnt_rows import LEARNT

# Few bytes, and work without end: all ways to cut a run of x into 128 pieces. LATE starts with it
# after three digits, whose masks are quick.
AMBIGUOUS = "a: b b\nb: c c\nc: d d\nd: e e\ne: f f\nf: g g\ng: /x+/ /x+/"
LATE = f"start: /[0-9]{{3}}/ a\n{AMBIGUOUS}"
START, END = 2040, 2  # the embedded model's <tool_call> and its end of a turn
LOOK = {
    "type": "object",
    "properties": {
        "at": {"type": "string", "enum": ["here", "zu Haus"]},
        "n": {"type": "integer", "minimum": 0, "maximum": 20},
        "deep": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    },
    "required": ["at", "n"],
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "look", "parameters": LOOK}},
    {"type": "function", "function": {"name": "rest"}},
]
FAMILIES = {row.name: row for row in (*FORMATS, *LEARNT)}


def markup(name: str) -> Markup:
    """The markup of a format, as a model has it whose only special markers are <tool_call>'s."""
    return Markup(
        format=FAMILIES[name],
        call_start=(START,) if FAMILIES[name].start else (),
        token_ids={"<tool_call>": START, "</tool_call>": 2041},
    )


def tool(name: str, parameters: dict[str, Any] | None = None) -> dict[str, Any]:
    function = {"name": name} if parameters is None else {"name": name, "parameters": parameters}
    return {"type": "function", "function": function}


def calls_of(events: Sequence[Event]) -> tuple[ToolCall, ...]:
    return join_calls([event for event in events if isinstance(event, ToolCallDelta)])


def allowed_tokens(mask: bytes) -> list[int]:
    return [t for t in range(len(mask) * 8) if mask[t >> 3] >> (t & 7) & 1]


def compile_lark(grammars: Grammars, source: str | None) -> Matcher:
    """A matcher of a call grammar."""
    assert source is not None
    structure = Structure(StructureKind.GRAMMAR, source, "tools")
    return asyncio.run(grammars.compile(structure)).open()


def outcome(matcher: Matcher, token_ids: Sequence[int] = ()) -> RowOutcome:
    """What the matcher says after these tokens."""
    for token in token_ids:
        matcher.consume(token)
    assert matcher.wait(60)
    assert matcher.outcome is not None
    return matcher.outcome


def drawn(
    guide: AnswerGuide, rng: Random, most: int, *, may_be_free: bool = False
) -> Iterator[int]:
    """Random allowed tokens, as if a model had sampled them, until the answer may end."""
    for _ in range(most):
        mask = guide.mask()
        if mask is None:
            assert may_be_free, "the answer is unconstrained"
            return
        allowed = allowed_tokens(mask)
        token = END if END in allowed else rng.choice(allowed)
        if token == END:
            return
        guide.read([token])
        yield token


def written(tokenizer: Tokenizer, grammars: Grammars, source: str | None, seed: int) -> str:
    """A text of random tokens that the grammar allows."""
    rng = Random(seed)
    matcher = compile_lark(grammars, source)
    token_ids: list[int] = []
    while len(token_ids) < 2_000:
        assert outcome(matcher, token_ids[-1:]) is not RowOutcome.REFUSED
        allowed = allowed_tokens(matcher.mask)
        token = END if END in allowed else rng.choice(allowed)
        if token == END:
            break
        token_ids.append(token)
    return tokenizer.decode(token_ids)

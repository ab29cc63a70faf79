"""The call formats of mlx-lm's parsers, with two tools, and answers drawn from a grammar's masks."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

from mlx_lm.tool_parsers import (
    function_gemma,
    gemma4,
    glm47,
    json_tools,
    kimi_k2,
    kimi_k3,
    longcat,
    minicpm5,
    minimax_m2,
    mistral,
    muse_spark,
    pythonic,
    qwen3_coder,
)

from mlxserve.sampling_params import Structure, StructureKind
from mlxserve.text.guidance.grammars import Grammars
from mlxserve.text.guidance.guide import AnswerGuide
from mlxserve.text.guidance.matcher_host import RowOutcome
from mlxserve.text.guidance.matchers import Matcher
from mlxserve.text.parsing.markup import Markup, Part
from mlxserve.text.parsing.readers import Event
from mlxserve.text.parsing.turn import ToolCall, ToolCallDelta, join_calls
from mlxserve.text.tokenizer import Tokenizer

# Few bytes, and work without end: all ways to cut a run of x into 128 pieces. LATE starts with it
# after three digits, whose masks are quick.
AMBIGUOUS = "a: b b\nb: c c\nc: d d\nd: e e\ne: f f\nf: g g\ng: /x+/ /x+/"
LATE = f"start: /[0-9]{{3}}/ a\n{AMBIGUOUS}"
START, END = 2040, 2  # the embedded model's <tool_call>, used as every family's marker
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
FAMILIES = {
    "json_tools": json_tools,
    "mistral": mistral,
    "kimi_k2": kimi_k2,
    "qwen3_coder": qwen3_coder,
    "minimax_m2": minimax_m2,
    "glm47": glm47,
    "longcat": longcat,
    "pythonic": pythonic,
    "gemma4": gemma4,
    "function_gemma": function_gemma,
    "kimi_k3": kimi_k3,
    "minicpm5": minicpm5,
    "muse_spark": muse_spark,
}


def markup(name: str) -> Markup:
    module: Any = FAMILIES[name]
    return Markup(
        edges={Part.TEXT: (("<tool_call>", Part.CALL),)},
        call_format=name,
        call_end=module.tool_call_end,
        parse_call=module.parse_tool_call,
        call_start=(START,),
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

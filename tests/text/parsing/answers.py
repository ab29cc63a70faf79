"""Answers of each format, and what a parser makes of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from mlxserve.text.parsing.formats import FORMATS
from mlxserve.text.parsing.markup import Markup, Part
from mlxserve.text.parsing.parser import TurnParser
from mlxserve.text.parsing.turn import (
    AssistantTurn,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    join_calls,
)
from tests.text.learnt_rows import LEARNT


def tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


STRING, INTEGER = {"type": "string"}, {"type": "integer"}
LOOK = {"at": STRING, "n": INTEGER}
TOOLS = [
    tool("look", **LOOK),
    tool("rest", **LOOK),
    tool("a", q=STRING),
    tool("b", q=STRING),
    tool("bash", command=STRING),
    tool("write", path=STRING, content=STRING),
    tool("fs/read", q=STRING, **LOOK),
    tool("fs:read", q=STRING, **LOOK),
    tool("resolve-library-id", q=STRING, **LOOK),
    tool("github.create_issue", **LOOK),
    tool(
        "typed",
        either={"anyOf": [INTEGER, STRING]},
        n={"type": "number"},
        big=INTEGER,
        maybe={"type": ["string", "null"]},
        flag={"type": "boolean"},
        list={"type": "array"},
        tree={"type": "object"},
        unknown={},
    ),
]
TURN = AssistantTurn(tools=TOOLS)
ROWS = {row.name: row for row in (*FORMATS, *LEARNT)}
HTML = ("<think>", "</think>")
# Formats of several messages: the headers of a text, and of a message of calls.
TEXT_HEADERS = {
    "harmony": "<|channel|>final<|message|>",
    "muse_spark": "to=user<|message|>",
    "inkling": "<|message_model|><|content_text|>",
    "functionary_v3_2": "all\n",
}
CALL_HEADERS = {"muse_spark": "to=look<|message|>", "inkling": "<|message_model|>look"}


def markup(name: str, thinking: tuple[str, str] = HTML) -> Markup:
    """The markup of a model that thinks and writes calls in a format."""
    row = ROWS[name]
    if row.channels is not None:
        return Markup(format=row, first=Part.HEADER)
    return Markup(format=row, thinking=thinking)


JSON = markup("json_tools")


@dataclass
class ParsedAnswer:
    text: str
    reasoning: str
    calls: list[tuple[str, Any]]
    num_deltas: int  # pieces of calls


def parse(
    text: str,
    markup: Markup = JSON,
    turn: AssistantTurn = TURN,
    *,
    pieces: Sequence[str] | None = None,
    is_thinking: bool = False,
    parsed: Callable[[str], Any] | None = None,
) -> ParsedAnswer:
    parser = TurnParser(markup, turn, is_thinking=is_thinking)
    events = [event for piece in pieces or [text] for event in parser.push(piece)]
    events += parser.finish()
    deltas = [event for event in events if isinstance(event, ToolCallDelta)]
    assert [d.index for d in deltas] == sorted(d.index for d in deltas)
    calls = join_calls(deltas)
    assert len({call.id for call in calls}) == len(calls)
    return ParsedAnswer(
        "".join(event.text for event in events if isinstance(event, TextDelta)),
        "".join(event.text for event in events if isinstance(event, ReasoningDelta)),
        [(call.name, (parsed or _json)(call.arguments)) for call in calls],
        len(deltas),
    )


def parse_in_pieces(text: str, markup: Markup, turn: AssistantTurn = TURN) -> ParsedAnswer:
    """The answer, which is the same in pieces of any size."""
    whole = parse(text, markup, turn)
    for size in (1, 2, 3, 5, 8):
        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        found = parse(text, markup, turn, pieces=pieces)
        assert (found.text, found.reasoning, found.calls) == (
            whole.text,
            whole.reasoning,
            whole.calls,
        ), size
    return whole


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def cut(text: str, places: Sequence[int]) -> list[str]:
    bounds = sorted({0, len(text), *(place % (len(text) + 1) for place in places)})
    return [text[a:b] for a, b in pairwise(bounds)] or [""]

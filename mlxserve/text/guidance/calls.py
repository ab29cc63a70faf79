"""Grammars of tool calls, in a family's own markup, with arguments that follow the tools' schemas.

A grammar covers either what follows the opening marker of a section of calls, or, if a call is
required, the whole answer including the marker. For unknown formats the planner can only force the
opening marker.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from mlxserve.text.guidance.families import (
    call_rule,
    lark_exactly,
    lark_marked,
    lark_text,
    text_rules,
)
from mlxserve.text.guidance.structures import check_schema
from mlxserve.text.parsing.markup import Markup

_Tool: TypeAlias = Mapping[str, Any]


def call_grammar(
    markup: Markup, tools: Sequence[_Tool], *, is_whole: bool, repeats: bool, otherwise: str = ""
) -> str | None:
    """The grammar in Lark; None for an unknown format.

    Raises ValueError for an invalid tool schema.
    is_whole: the answer consists of calls only; otherwise the grammar starts after the marker, or
        with its last token if the tokenizer may merge that with what follows
    repeats: several calls are allowed
    otherwise: an alternative for the whole answer, in Lark
    """
    row = markup.format
    if row is None or (not is_whole and not markup.call_start):
        # No marker shows that a call starts: a text starts with the same token.
        return None
    rules = [_rule(markup, number, tool["function"]) for number, tool in enumerate(tools)]
    top = _top(markup, is_whole=is_whole, repeats=repeats)
    if otherwise:
        top = f"{top} | {otherwise}"
    calls = " | ".join(f"call{number}" for number in range(len(tools)))
    return "\n".join([f"start: {top}", f"call: {calls}", *rules, *text_rules(row)])


def _rule(markup: Markup, number: int, function: Mapping[str, Any]) -> str:
    return f"call{number}: {call_rule(markup, function['name'], _schema(function))}"


def _top(markup: Markup, *, is_whole: bool, repeats: bool) -> str:
    row = markup.format
    assert row is not None
    opening, closing, end = (
        lark_marked(markup, text) for text in (row.opening, row.closing, row.end)
    )
    start = lark_exactly(markup, row.start)
    if row.channels is not None and row.channels.calls is not None:
        start, end = f'({lark_marked(markup, "<|start|>")} "assistant")?', ""
        # The token that ends a call ends the answer.
        repeats = False
    more = ""
    if repeats and row.joint is not None:
        more = f"({lark_marked(markup, row.joint)} call)*" if row.joint else "call*"
    section = " ".join(filter(None, [opening, "call", more, closing, end]))
    if not is_whole:
        return f"{lark_text(markup.call_tail)} {section}" if markup.call_tail else section
    if repeats and row.joint is None and start:  # one call in a section
        return f'{start} {section} ("\\n"? {start} {section})*'
    return f"{start} {section}".strip()


def _schema(function: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of the arguments, closed to undeclared ones."""
    schema = dict(function.get("parameters") or {})
    try:
        check_schema(schema)
    except ValueError as error:
        raise ValueError(f"the parameters of {function['name']!r}: {error}") from error
    schema.setdefault("type", "object")
    schema.setdefault("properties", {})
    schema.setdefault("additionalProperties", False)
    return schema

"""Grammars of tool calls, in a family's own markup, with arguments that follow the tools' schemas.

A grammar covers either what follows the opening marker of a section of calls, or, if a call is
required, the whole answer including the marker. For unknown formats the planner can only force the
opening marker.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from mlxserve.text.guidance.families import BODIES, RULES, Unwritable, lark_text, lark_token
from mlxserve.text.guidance.structures import check_schema
from mlxserve.text.parsing.markup import Markup

_Tool: TypeAlias = Mapping[str, Any]
# Formats that put several calls into one section.
_SECTIONS = frozenset({"kimi_k2", "kimi_k3", "minimax_m2", "muse_spark"})
# Markers that are not a single token, in the pieces that may be one.
_STARTS = {
    "kimi_k3": ("<|open|>", "tools", "<|sep|>"),
    "minicpm5": ("<function name=",),
    "muse_spark": ("<atem:function_calls>",),
}
_ENDS = {"kimi_k3": ("<|close|>", "tools", "<|sep|>")}


def call_grammar(
    markup: Markup, tools: Sequence[_Tool], *, is_whole: bool, repeats: bool, otherwise: str = ""
) -> str | None:
    """The grammar in Lark; None for an unknown format, or for arguments it cannot express.

    Raises ValueError for an invalid tool schema.
    is_whole: the answer consists of calls only; otherwise the grammar starts after the marker, or
        with its last token if the tokenizer may merge that with what follows
    repeats: several calls are allowed
    otherwise: an alternative for the whole answer, in Lark
    """
    if not _is_known(markup, is_whole=is_whole):
        return None
    try:
        rules = [_rule(markup, number, tool["function"]) for number, tool in enumerate(tools)]
    except Unwritable:
        return None
    top = _top(markup, is_whole=is_whole, repeats=repeats and not markup.is_bare)
    if otherwise:
        top = f"{top} | {otherwise}"
    calls = " | ".join(f"call{number}" for number in range(len(tools)))
    return "\n".join([f"start: {top}", f"call: {calls}", *rules, *RULES])


def _is_known(markup: Markup, *, is_whole: bool) -> bool:
    """Whether the call format, and where a call starts, are known."""
    if markup.call_format not in BODIES:
        return False
    if markup.is_bare or markup.call_format == "harmony":
        return is_whole  # no marker shows that a call starts: a text starts with the same token
    return len(markup.call_start) == 1 or markup.call_format in _STARTS


def _rule(markup: Markup, number: int, function: Mapping[str, Any]) -> str:
    body = BODIES[markup.call_format or ""]
    return f"call{number}: {body(markup, function['name'], _schema(function))}"


def _top(markup: Markup, *, is_whole: bool, repeats: bool) -> str:
    start, end = _start(markup), _end(markup)
    has_section = markup.call_format in _SECTIONS
    section = f"{'call+' if has_section and repeats else 'call'} {end}".strip()
    if not is_whole:
        return f"{lark_text(markup.call_tail)} {section}" if markup.call_tail else section
    if repeats and not has_section and markup.call_format != "harmony":  # one call in a turn
        return f'{start} {section} ("\\n"? {start} {section})*'
    return f"{start} {section}".strip()


def _schema(function: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of the arguments. Undeclared arguments are not allowed."""
    schema = dict(function.get("parameters") or {})
    try:
        check_schema(schema)
    except ValueError as error:
        raise ValueError(f"the parameters of {function['name']!r}: {error}") from error
    schema.setdefault("type", "object")
    schema.setdefault("properties", {})
    schema.setdefault("additionalProperties", False)
    return schema


def _start(markup: Markup) -> str:
    if markup.is_bare:
        return ""
    if markup.call_format != "harmony":
        pieces = _STARTS.get(markup.call_format or "", ())
        is_token = len(markup.call_start) == 1
        return f"<[{markup.call_start[0]}]>" if is_token else _marker(markup, pieces)
    again = f'({lark_token(markup, "<|start|>")} "assistant")?'
    return f'{again} {lark_token(markup, "<|channel|>")} "commentary to=functions."'


def _end(markup: Markup) -> str:
    if markup.call_format == "harmony":
        return ""  # the token that ends a call ends the answer
    if pieces := _ENDS.get(markup.call_format or ""):
        return _marker(markup, pieces)
    return lark_token(markup, markup.call_end) if markup.call_end else ""


def _marker(markup: Markup, pieces: Sequence[str]) -> str:
    return " ".join(lark_token(markup, piece) for piece in pieces)

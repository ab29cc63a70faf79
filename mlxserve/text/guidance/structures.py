"""Structures as llguidance reads them, and the bounds of what is compiled at all.

Sources are bounded before they are compiled: a schema with 10,000 properties would take half a
minute.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from mlxserve.core.errors import InvalidParameter
from mlxserve.core.sampling_params import Structure, StructureKind
from mlxserve.text.guidance.schemas import narrowed
from mlxserve.text.parsing.turn import AssistantTurn, ToolChoice

MAX_SOURCE = 64 << 10  # characters of a source that a client sent
# Characters of a grammar generated for all tools of a request.
MAX_GRAMMAR = 512 << 10
# 300 compile in 25 ms, 1,000 in 0.2 s, 3,000 in 1.7 s.
MAX_PROPERTIES = 500
MAX_DEPTH = 32
# The white space of usual JSON. Unbounded, small models never stop generating white space.
WHITE_SPACE = r"[ ]|\n[ ]{0,32}"


def grammar_text(kind: StructureKind, source: str) -> str:
    """Return llguidance's source. Raises ValueError or RecursionError for an invalid one."""
    from llguidance import LLMatcher

    match kind:
        case StructureKind.JSON_OBJECT:
            return LLMatcher.grammar_from_json_schema(_with_options({"type": "object"}))
        case StructureKind.JSON_SCHEMA:
            schema = json.loads(source)
            check_schema(schema)
            return LLMatcher.grammar_from_json_schema(_with_options(narrowed(schema)[0]))
        case StructureKind.REGEX:
            return LLMatcher.grammar_from_regex(source)
        case StructureKind.CHOICE:
            words = json.loads(source)
            quoted = " | ".join(json.dumps(word, ensure_ascii=False) for word in words)
            return LLMatcher.grammar_from_lark(f"start: {quoted}")
        case StructureKind.GRAMMAR:
            return LLMatcher.grammar_from_lark(source)


def inline(structure: Structure) -> str | None:
    """A structure as an expression inside a Lark grammar; None for one that is a whole grammar.

    Raises InvalidParameter for an invalid or too large schema.
    """
    from llguidance import regex_to_lark

    match structure.kind:
        case StructureKind.GRAMMAR:
            return None
        case StructureKind.REGEX:
            return f"/{regex_to_lark(structure.source)}/"
        case StructureKind.CHOICE:
            words = json.loads(structure.source)
            return " | ".join(json.dumps(word, ensure_ascii=False) for word in words)
        case StructureKind.JSON_OBJECT:
            return json_text({"type": "object"})
    try:
        schema = json.loads(structure.source)
        check_schema(schema)
        return json_text(narrowed(schema)[0])
    except (ValueError, RecursionError) as error:
        raise InvalidParameter(structure.field, f"cannot be read: {error}") from error


def json_text(schema: Mapping[str, Any], *, is_lenient: bool = False) -> str:
    """Return a Lark expression for JSON that follows a schema.

    is_lenient: as far as it can be followed
    """
    if is_lenient:
        schema, _ = narrowed(schema, is_lenient=True)
    text = json.dumps(_with_options(schema, is_lenient=is_lenient), ensure_ascii=False)
    return f"%json {text}"


def not_enforced(structure: Structure | None, turn: AssistantTurn | None) -> list[str]:
    """List keywords of an answer's schemas that only narrow and are not enforced."""
    keywords: set[str] = set()
    if structure is not None and structure.kind is StructureKind.JSON_SCHEMA:
        keywords |= narrowed(json.loads(structure.source), is_lenient=True)[1]
    if turn is not None and turn.tool_choice is ToolChoice.REQUIRED:
        for tool in turn.tools:
            schema = tool["function"].get("parameters") or {}
            keywords |= narrowed(schema, is_lenient=True)[1]
    return sorted(keywords)


def _with_options(schema: Mapping[str, Any], *, is_lenient: bool = False) -> dict[str, Any]:
    """A schema with llguidance's options, which it reads from a member of its own."""
    options = {
        "whitespace_pattern": WHITE_SPACE,
        "lenient": is_lenient,
        # Of options that may overlap; `narrowed` tells the client.
        "coerce_one_of": True,
    }
    return {**schema, "x-guidance": options}


def check_schema(schema: object) -> None:
    """Raises ValueError for a value that is not a schema, or one too large to compile."""
    if not isinstance(schema, dict):
        raise ValueError("a JSON schema must be an object")
    num_properties = 0
    for value, depth in _walk(schema):
        if depth > MAX_DEPTH:
            raise ValueError(f"it is nested deeper than {MAX_DEPTH} levels")
        properties = value.get("properties")
        num_properties += len(properties) if isinstance(properties, dict) else 0
        if num_properties > MAX_PROPERTIES:
            raise ValueError(f"it has more than {MAX_PROPERTIES} properties")


def _walk(value: object) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield every object in the value, with its depth."""
    waiting = [(value, 1)]
    while waiting:
        node, depth = waiting.pop()
        if isinstance(node, dict):
            yield node, depth
            waiting += [(inner, depth + 1) for inner in node.values()]
        elif isinstance(node, list):
            waiting += [(inner, depth) for inner in node]

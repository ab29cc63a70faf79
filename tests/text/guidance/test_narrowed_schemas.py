"""Keywords that only narrow are dropped and named; those that change the shape are refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mlxserve.core.sampling_params import Structure, StructureKind
from mlxserve.text.guidance.schemas import narrowed
from mlxserve.text.guidance.structures import grammar_text, not_enforced
from mlxserve.text.parsing.turn import AssistantTurn, ToolChoice


def compiles(schema: dict[str, Any]) -> bool:
    from llguidance import LLMatcher

    text = grammar_text(StructureKind.JSON_SCHEMA, json.dumps(schema))
    return not LLMatcher.validate_grammar(text, None)


def test_what_only_narrows_is_dropped_wherever_it_is() -> None:
    for keyword, value, name in [
        ("uniqueItems", True, "uniqueItems"),
        ("contains", {"type": "string"}, "contains"),
        ("minContains", 1, "minContains"),
        ("propertyNames", {"pattern": "^a"}, "propertyNames"),
        ("dependentRequired", {"a": ["b"]}, "dependentRequired"),
        ("format", "phone", "format phone"),
        ("pattern", "^(?=a)b", "pattern ^(?=a)b"),
        ("pattern", "^(?!a)b", "pattern ^(?!a)b"),
        ("pattern", "a(?<=b)", "pattern a(?<=b)"),
        ("pattern", "a(?<!b)", "pattern a(?<!b)"),
        ("pattern", r"(a)\1", r"pattern (a)\1"),
        ("pattern", r"\bword\b", r"pattern \bword\b"),
    ]:
        inner = {"type": "array" if keyword == "uniqueItems" else "string", keyword: value}
        for schema in (
            inner,
            {"type": "object", "properties": {"a": inner}},
            {"type": "array", "items": inner},
            {"anyOf": [inner, {"type": "null"}]},
            {"$defs": {"x": inner}, "$ref": "#/$defs/x"},
        ):
            kept, dropped = narrowed(schema)
            assert dropped == {name}, schema
            assert keyword not in json.dumps(kept), schema
            assert compiles(schema), schema


TAGGED = [
    {"type": "object", "properties": {"kind": {"const": kind}}, "required": ["kind"]}
    for kind in ("a", "b")
]


@pytest.mark.parametrize(
    ("options", "is_disjoint"),
    [
        ([{"type": "string"}, {"type": "integer"}], True),
        ([{"type": "string"}, {"type": ["object", "null"]}], True),
        ([{"const": "a"}, {"enum": ["b", 1]}], True),
        (TAGGED, True),
        ([{"type": "number"}, {"type": "integer"}], False),
        ([{"type": "string", "maxLength": 3}, {"type": "string", "pattern": "^a"}], False),
        ([{"enum": ["a", "b"]}, {"enum": ["b", "c"]}], False),
        ([{**option, "required": []} for option in TAGGED], False),
        ([TAGGED[0], TAGGED[0]], False),
        ([{"type": "string"}, True], False),
    ],
)
def test_one_of_is_any_of_and_told_where_options_may_overlap(
    options: list[Any], is_disjoint: bool
) -> None:
    for schema in ({"oneOf": options}, {"type": "array", "items": {"oneOf": options}}):
        assert compiles(schema), schema
        assert narrowed(schema)[1] == (set() if is_disjoint else {"oneOf (at least one is)"})


def test_names_and_values_that_look_like_keywords_stay() -> None:
    for schema in [
        {"type": "object", "properties": {"uniqueItems": {"type": "boolean"}}},
        {"type": "string", "format": "date-time"},
        {"type": "string", "pattern": "^[a-z]+(?:-[0-9]+)?$"},
        {"type": "string", "pattern": r"^\\\\b$"},
        {"enum": [{"format": "phone"}, {"uniqueItems": True}]},
        {"const": {"pattern": "(?=a)"}},
    ]:
        assert narrowed(schema) == (schema, frozenset()), schema


def test_what_changes_the_shape_is_refused_by_its_name() -> None:
    for keyword in ["not", "if", "dependentSchemas", "unevaluatedProperties", "$dynamicRef"]:
        schema = {"type": "object", "properties": {"a": {"type": "object", keyword: {}}}}
        with pytest.raises(ValueError, match=f"the keyword '{keyword.replace('$', '.')}' cannot"):
            narrowed(schema)


def test_what_is_not_enforced_is_named_of_a_structure_and_of_tools_that_must_be_called() -> None:
    schema = {"type": "array", "uniqueItems": True}
    structure = Structure(StructureKind.JSON_SCHEMA, json.dumps(schema), "response_format")
    assert not_enforced(structure, None) == ["uniqueItems"]
    tool = {"type": "function", "function": {"name": "f", "parameters": {"format": "x", **schema}}}
    turn = AssistantTurn(tools=(tool,), tool_choice=ToolChoice.REQUIRED)
    assert not_enforced(None, turn) == ["format x", "uniqueItems"]
    assert not_enforced(None, AssistantTurn(tools=(tool,))) == []

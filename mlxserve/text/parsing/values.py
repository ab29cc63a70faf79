"""Unquoted values of arguments, typed by the tool's schema."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping, Sequence
from typing import Any

from mlxserve.system.strict_json import refuse_constant

# The JSON types of Python's values; a mapping of any kind is an object.
_KIND_OF = {
    type(None): "null",
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
}
# Names of types in schemas of the wild, by their beginning.
_KINDS = {
    begin: kind
    for kind, begins in {
        "string": "str text varchar char enum",
        "integer": "int uint long short unsigned",
        "number": "num float double",
        "boolean": "bool binary",
        "array": "arr list",
        "object": "dict obj",
        "null": "null",
    }.items()
    for begin in begins.split()
}
_WORDS = {"true": "true", "false": "false", "none": "null", "null": "null"}


class Malformed(ValueError):
    """The text is not a call, or not a value."""


def schemas_of(tools: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """The schemas of the tools' arguments by the tools' names; of two with one name, the first's."""
    functions = [tool["function"] for tool in reversed(tools)]
    return {str(function["name"]): function.get("parameters") or {} for function in functions}


def properties_of(schema: Any) -> Mapping[str, Any]:
    """The schemas of an object's properties."""
    properties = schema.get("properties") if isinstance(schema, dict) else None
    return properties if isinstance(properties, dict) else {}


def kinds_of(schema: Any) -> frozenset[str]:
    """The JSON types that a schema allows; empty if it does not say."""
    if not isinstance(schema, dict):
        return frozenset()
    choices = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(choices, list) and choices:
        return frozenset(map(kind_of, choices))
    types = schema.get("type", [])
    kinds = {_kind(str(name)) for name in (types if isinstance(types, list) else [types])}
    for word in ("anyOf", "oneOf", "allOf"):
        parts = schema.get(word)
        for part in parts if isinstance(parts, list) else ():
            kinds |= kinds_of(part)
    return frozenset(kinds - {""})


def kind_of(value: Any) -> str:
    """The JSON type of a value."""
    return _KIND_OF.get(type(value), "object")


def value_json(text: str, kinds: frozenset[str], *, is_text: bool | None = None) -> str:
    """Return a value as JSON. Numbers keep all their digits, and texts all their characters.

    is_text: what the markup says about it, if it says anything
    """
    if is_text or (is_text is None and kinds == {"string"}):
        return to_json(text)
    written = _parsed(text)
    if written is not None:
        raw, value = written
        kind = kind_of(value)
        fits = kind in kinds or (kind == "integer" and "number" in kinds)
        if fits or is_text is False or (kind != "string" and "string" not in kinds):
            return raw
    elif kinds and "string" not in kinds and (literal := _literal(text.strip())) is not None:
        return literal
    return to_json(text)


def to_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def object_json(members: Mapping[str, str]) -> str:
    """Return an object whose values are JSON already."""
    return "{" + ", ".join(f"{to_json(key)}: {value}" for key, value in members.items()) + "}"


def _kind(name: str) -> str:
    name = name.strip().lower()
    return next((kind for begin, kind in _KINDS.items() if name.startswith(begin)), "")


def json_value(text: str, *, is_strict: bool = True) -> Any:
    """Parse a JSON text. Raises Malformed."""
    try:
        return json.loads(text, strict=is_strict, parse_constant=refuse_constant)
    except (ValueError, RecursionError) as error:
        raise Malformed(str(error)) from error


def _parsed(text: str) -> tuple[str, Any] | None:
    """Return (the text of a JSON value, the value); None for any other text."""
    raw = text.strip()
    try:
        return raw, json_value(raw)
    except Malformed:
        pass
    # Models write raw line breaks in strings.
    try:
        value = json_value(raw, is_strict=False)
    except Malformed:
        return None
    return to_json(value), value


def _literal(text: str) -> str | None:
    """Convert a Python literal to JSON."""
    if (word := _WORDS.get(text.lower())) is not None:
        return word
    if not text.startswith(("{", "[", "(")):
        return None
    try:
        return json.dumps(ast.literal_eval(text), ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return None

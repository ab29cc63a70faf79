"""Unquoted values of arguments, typed by the tool's schema."""

from __future__ import annotations

import ast
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from mlxserve.system.well_formed import well_formed_value

# Of a call's arguments: as deep as a schema may be. Templates, msgpack, SDKs and the parser of bodies,
# which a client sends the arguments back to, all have limits of their own above it.
MAX_DEPTH = 32

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


def schema_of(tools: Sequence[Mapping[str, Any]], name: str) -> Mapping[str, Any]:
    """The schema of a tool's arguments; empty for an unknown tool."""
    for tool in tools:
        function = tool.get("function") or {}
        if function.get("name") == name:
            return function.get("parameters") or {}
    return {}


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
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    if isinstance(value, int | float):
        return "integer" if isinstance(value, int) else "number"
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, list) else "object"


def value_json(text: str, kinds: frozenset[str], *, is_text: bool | None = None) -> str:
    """Return a value as JSON. Numbers keep all their digits, and texts all their characters.

    is_text: what the markup says about it, if it says anything
    """
    if is_text or (is_text is None and kinds == {"string"}):
        return quoted(text)
    written = _parsed(text)
    if written is not None:
        raw, value = written
        kind = kind_of(value)
        fits = kind in kinds or (kind == "integer" and "number" in kinds)
        if fits or is_text is False or (kind != "string" and "string" not in kinds):
            return raw
    elif kinds and "string" not in kinds and (literal := _literal(text.strip())) is not None:
        return literal
    return quoted(text)


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def object_json(members: Mapping[str, str]) -> str:
    """Return an object whose values are JSON already."""
    return "{" + ", ".join(f"{quoted(key)}: {value}" for key, value in members.items()) + "}"


def _kind(name: str) -> str:
    name = name.strip().lower()
    return next((kind for begin, kind in _KINDS.items() if name.startswith(begin)), "")


def json_value(text: str, *, is_strict: bool = True) -> Any:
    """Parse a JSON text. Raises ValueError."""
    try:
        return json.loads(text, strict=is_strict, parse_constant=_refuse)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def arguments_object(text: str) -> dict[str, Any] | None:
    """Parse a call's arguments as an object; None if they are none, or not strict JSON."""
    try:
        value = json.loads(text or "{}", parse_constant=_refuse, parse_float=_finite)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or not _is_within(value, MAX_DEPTH):
        return None
    arguments: dict[str, Any] = well_formed_value(value)
    return arguments


def _is_within(value: Any, depth: int) -> bool:
    """True if a value is nested at most this deep."""
    if not isinstance(value, (dict, list)):
        return True
    items = value.values() if isinstance(value, dict) else value
    return depth > 0 and all(_is_within(item, depth - 1) for item in items)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(f"{digits[:40]} is out of range")
    return value


def _parsed(text: str) -> tuple[str, Any] | None:
    """Return (the text of a JSON value, the value); None for any other text."""
    raw = text.strip()
    try:
        return raw, json_value(raw)
    except ValueError:
        pass
    # Models write raw line breaks in strings.
    try:
        value = json_value(raw, is_strict=False)
    except ValueError:
        return None
    return json.dumps(value, ensure_ascii=False), value


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

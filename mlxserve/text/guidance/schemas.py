"""JSON schemas as llguidance can follow them.

Clients generate schemas with keywords that only narrow what fits (`uniqueItems` of pydantic's sets,
zod's patterns with look-ahead). Without these the answer keeps its shape, so they are dropped, and
the client is told. So is `oneOf` of schemas that may overlap: the answer follows at least one of
them. A keyword that changes the shape is refused by its name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

_NARROWING = frozenset(
    {
        "contains",
        "dependentRequired",
        "maxContains",
        "minContains",
        "propertyNames",
        "uniqueItems",
    }
)
_SHAPING = frozenset(
    {
        "$dynamicRef",
        "$recursiveRef",
        "dependencies",
        "dependentSchemas",
        "else",
        "if",
        "not",
        "then",
        "unevaluatedItems",
        "unevaluatedProperties",
    }
)
_FORMATS = frozenset(
    {
        "date",
        "date-time",
        "duration",
        "email",
        "hostname",
        "ipv4",
        "ipv6",
        "time",
        "unknown",
        "uri",
        "uuid",
    }
)
# Look-around, references to groups and edges of words are no part of a regular language.
_IRREGULAR = re.compile(r"\(\?<?[=!]|(?<!\\)(?:\\\\)*\\(?:[1-9bB]|k<)")
# Where schemas are inside a schema: by name, in a list, alone.
_NAMED = ("$defs", "definitions", "patternProperties", "properties")
_LISTED = ("allOf", "anyOf", "items", "oneOf", "prefixItems")
_SINGLE = ("additionalItems", "additionalProperties", "items")
_SHOWN = 40  # characters of a dropped value


def narrowed(
    schema: Mapping[str, Any], *, is_lenient: bool = False
) -> tuple[dict[str, Any], frozenset[str]]:
    """(the schema without what only narrows and cannot be followed, descriptions of that).

    Raises ValueError for a keyword that changes the shape, unless `is_lenient`, as then llguidance
    ignores it. Of a schema that `check_schema` has accepted, which bounds its depth.
    """
    dropped: set[str] = set()
    return _narrowed(schema, dropped, is_lenient=is_lenient), frozenset(dropped)


def _narrowed(schema: Any, dropped: set[str], *, is_lenient: bool) -> Any:
    if not isinstance(schema, Mapping):
        # True, false, or what the compiler refuses.
        return schema
    kept: dict[str, Any] = {}
    for name, value in schema.items():
        if name in _SHAPING and not is_lenient:
            raise ValueError(
                f"the keyword {name!r} cannot be enforced, and without it the answer might have "
                "another shape; leave it out, or describe each shape with anyOf"
            )
        if name == "oneOf" and isinstance(value, list) and not _are_disjoint(value):
            dropped.add("oneOf (at least one is)")
        if (description := _dropped(name, value)) is not None:
            dropped.add(description)
        elif name in _NAMED and isinstance(value, Mapping):
            kept[name] = {
                key: _narrowed(inner, dropped, is_lenient=is_lenient)
                for key, inner in value.items()
            }
        elif name in _LISTED and isinstance(value, list):
            kept[name] = [_narrowed(inner, dropped, is_lenient=is_lenient) for inner in value]
        elif name in _SINGLE:
            kept[name] = _narrowed(value, dropped, is_lenient=is_lenient)
        else:
            kept[name] = value
    return kept


def _are_disjoint(options: Sequence[object]) -> bool:
    """True if the options differ in their types, or in the constants of a property that all require."""
    schemas = [option for option in options if isinstance(option, Mapping)]
    if not schemas or len(schemas) < len(options):
        return False
    shared = set.intersection(*(set(_strings(schema.get("required"))) for schema in schemas))
    constants = [[_constants(_property(schema, name)) for schema in schemas] for name in shared]
    values = [_constants(schema) for schema in schemas]
    return any(map(_have_nothing_in_common, (list(map(_types, schemas)), values, *constants)))


def _have_nothing_in_common(sets: Sequence[frozenset[str]]) -> bool:
    return all(sets) and sum(map(len, sets)) == len(frozenset().union(*sets))


def _strings(value: object) -> list[str]:
    values = value if isinstance(value, list) else [value]
    return [text for text in values if isinstance(text, str)]


def _types(schema: Mapping[str, Any]) -> frozenset[str]:
    """The types of a schema. An integer is a number."""
    return frozenset("number" if t == "integer" else t for t in _strings(schema.get("type")))


def _property(schema: Mapping[str, Any], name: str) -> object:
    properties = schema.get("properties")
    return properties.get(name) if isinstance(properties, Mapping) else None


def _constants(schema: object) -> frozenset[str]:
    """The only values of a schema as JSON; none if it has others."""
    if not isinstance(schema, Mapping):
        return frozenset()
    enum = schema.get("enum")
    values = [schema["const"]] if "const" in schema else enum if isinstance(enum, list) else []
    return frozenset(json.dumps(value, sort_keys=True) for value in values)


def _dropped(name: str, value: object) -> str | None:
    """Name a keyword that is dropped; None for one that is kept."""
    if name in _NARROWING:
        return name
    if name == "format" and isinstance(value, str) and value not in _FORMATS:
        return f"format {value[:_SHOWN]}"
    if name == "pattern" and isinstance(value, str) and _IRREGULAR.search(value):
        return f"pattern {value[:_SHOWN]}"
    return None

"""Hostile values for every field of every route, generated from the server's own OpenAPI document.

Each string is 64 KiB of one character, each number 1e308, NaN or a neighbour of its bounds, each list
has its most items, and each object many members. One field is hostile at a time; the rest of the body
is the smallest valid one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tests.api.smallest_bodies import SmallestBodies

STRING_SIZE = 64 << 10
# Digits and brackets are repeated in rules of regular expressions, backslashes and spaces in lexers.
CHARACTERS = 'a1([{\\" \n<`*éx\x00'
MAX_ITEMS, MAX_MEMBERS = 10_000, 4_000  # where a schema names no bound
NUMBERS = ("1e308", "-1e308", "1e400", "NaN", "-Infinity", "0", "-1", "0.5", str(2**63), "9" * 400)
# The model of the server stays loaded: a valid body would unload it, at once or soon.
OTHERS: Mapping[str, Mapping[str, Any]] = {
    "LoadRequest": {"model": "missing"},
    "UnloadRequest": {"model": "missing"},
}
_MAX_DEPTH = 4  # of fields within fields; some schemas contain themselves


@dataclass(frozen=True)
class Case:
    """A body with one hostile field, as JSON: NaN is none, and Python would not write it.

    name: the route and the field with what it holds
    """

    name: str
    method: str
    path: str
    body: bytes


class HostileFields:
    """The cases of one document."""

    def __init__(self, document: Mapping[str, Any], model: str) -> None:
        """model: the name of the server's model"""
        self._schemas: Mapping[str, Any] = document["components"]["schemas"]
        self._bodies = SmallestBodies(document, model)

    def cases(self) -> Iterator[Case]:
        for (method, path), name in self._bodies.names().items():
            smallest = self._bodies.body(name) | OTHERS.get(name, {})
            for field, value in self._of_object(self._schemas[name], 0):
                label = f"{method} {path} {'.'.join(map(str, field))}: {_shown(value)}"
                yield Case(label, method, path, _encoded(_replaced(smallest, field, value)))

    def _of_object(
        self, schema: Mapping[str, Any], depth: int
    ) -> Iterator[tuple[tuple[str | int, ...], str]]:
        """Yield (path of a field, its hostile value as JSON)."""
        for name, inner in schema.get("properties", {}).items():
            for path, value in self._of_value(inner, depth):
                yield (name, *path), value

    def _of_value(
        self, schema: Mapping[str, Any], depth: int
    ) -> Iterator[tuple[tuple[str | int, ...], str]]:
        schema = self._resolved(schema)
        for option in (*schema.get("anyOf", ()), *schema.get("oneOf", ())):
            yield from self._of_value(option, depth)
        kind = schema.get("type")
        if kind == "string" or "enum" in schema or not schema:
            for character in CHARACTERS:
                yield (), json.dumps(character * STRING_SIZE, ensure_ascii=False)
        if kind in ("integer", "number") or not schema:
            yield from (((), number) for number in _numbers(schema))
        if kind == "array" or not schema:
            yield from self._of_list(schema, depth)
        if kind == "object" or not schema:
            members = ", ".join(f'"m{number}": {number}' for number in range(MAX_MEMBERS))
            yield (), f"{{{members}}}"
            yield (), '{"a": ' * 60 + "1" + "}" * 60
            if depth < _MAX_DEPTH:
                yield from self._of_object(schema, depth + 1)

    def _of_list(
        self, schema: Mapping[str, Any], depth: int
    ) -> Iterator[tuple[tuple[str | int, ...], str]]:
        items = schema.get("items") or {}
        item = json.dumps(self._smallest(items))
        for count in (schema.get("maxItems", MAX_ITEMS), schema.get("maxItems", MAX_ITEMS) + 1):
            yield (), f"[{', '.join([item] * count)}]"
        if items and depth < _MAX_DEPTH:
            for path, value in self._of_value(items, depth + 1):
                yield (0, *path), value

    def _smallest(self, schema: Mapping[str, Any]) -> Any:
        return self._bodies.value(schema)

    def _resolved(self, schema: Mapping[str, Any]) -> Mapping[str, Any]:
        while "$ref" in schema:
            schema = self._schemas[schema["$ref"].rpartition("/")[2]]
        return schema


def _numbers(schema: Mapping[str, Any]) -> Iterator[str]:
    yield from NUMBERS
    for bound in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
        if bound in schema:
            for step in (-1, 0, 1):
                yield json.dumps(schema[bound] + step)


_PLACE = "hostile value"  # a text that no body has


def _replaced(body: Any, path: tuple[str | int, ...], value: str) -> tuple[Any, str]:
    """(the body with a mark at this path, the value that stands there)."""
    if not path:
        return _PLACE, value
    step, *rest = path
    if isinstance(step, int):
        inner = body[0] if isinstance(body, list) and body else {}
        return [_replaced(inner, tuple(rest), value)[0]], value
    members = dict(body) if isinstance(body, dict) else {}
    members[step] = _replaced(members.get(step), tuple(rest), value)[0]
    return members, value


def _encoded(replaced: tuple[Any, str]) -> bytes:
    body, value = replaced
    return json.dumps(body).replace(f'"{_PLACE}"', value, 1).encode()


def _shown(value: str) -> str:
    return value if len(value) < 30 else f"{value[:20]}… of {len(value)}"

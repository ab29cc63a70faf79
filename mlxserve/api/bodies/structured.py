"""Fields that constrain an answer's format, each turned into a `Structure`.

OpenAI's API has JSON; regular expressions, choices and grammars are an extension, named as in vLLM.
Only the form of the field is checked here; a schema is checked when it is compiled.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, TypeAlias

from pydantic import PlainValidator

from mlxserve.core.sampling_params import Structure, StructureKind

MAX_CHOICES = 1_000
FORMAT_TYPES = ("text", "json_object", "json_schema")
_EXTENSION = {
    "json": StructureKind.JSON_SCHEMA,
    "regex": StructureKind.REGEX,
    "choice": StructureKind.CHOICE,
    "grammar": StructureKind.GRAMMAR,
}
# Keywords by which a schema that stands alone, as in Ollama's API, is recognised.
_OF_SCHEMAS = frozenset({"$ref", "anyOf", "const", "enum", "items", "oneOf", "properties"})


def format_of(value: object, field: str, inner: str | None = None) -> Structure | None:
    """Read OpenAI's response format, a schema alone, or a type alone. Raises ValueError.

    inner: the member that holds the schema, which is next to the type otherwise
    """
    if value in (None, "", {}):
        return None
    if isinstance(value, str):
        value = {"type": "json_object" if value == "json" else value}
    if not isinstance(value, dict):
        raise ValueError('must be an object such as {"type": "json_object"}')
    match value.get("type"):
        case "text":
            return None
        case "json_object" | "json_schema" if (schema := _schema_in(value, field)) is not None:
            return schema
        case "json_object":
            return Structure(StructureKind.JSON_OBJECT, field=field)
        case "json_schema":
            place = "schema" if inner is None else f"{inner}.schema"
            raise ValueError(f"json_schema needs an object `{place}`")
    if not _OF_SCHEMAS.isdisjoint(value):
        return Structure(StructureKind.JSON_SCHEMA, json.dumps(value), field)
    raise ValueError("the type must be 'text', 'json_object' or 'json_schema'")


def _schema_in(value: Mapping[str, Any], field: str) -> Structure | None:
    """The schema within `json_schema`, as in chat completions, or beside the type."""
    holders = (("json_schema.schema", value.get("json_schema")), ("schema", value))
    for path, holder in holders:
        if isinstance(holder, dict) and isinstance(holder.get("schema"), dict):
            source = json.dumps(holder["schema"])
            return Structure(StructureKind.JSON_SCHEMA, source, f"{field}.{path}")
    return None


def structured_outputs(value: object) -> Structure | None:
    """Read our extension: one of a JSON schema, a regular expression, a choice or a grammar."""
    if value in (None, {}):
        return None
    known = [name for name in _EXTENSION if isinstance(value, dict) and value.get(name) is not None]
    if not isinstance(value, dict) or len(known) != 1 or len(value) > len(_EXTENSION):
        raise ValueError(f"must be an object with one of {', '.join(_EXTENSION)}")
    [name] = known
    return Structure(_EXTENSION[name], _source(name, value[name]), f"structured_outputs.{name}")


def _source(name: str, value: object) -> str:
    if name == "json" and isinstance(value, dict):
        return json.dumps(value)
    if name == "choice":
        is_list = isinstance(value, list) and 0 < len(value) <= MAX_CHOICES
        if not is_list or not all(isinstance(word, str) and word for word in value):  # type: ignore[attr-defined]
            raise ValueError(f"choice must be a list of up to {MAX_CHOICES} texts")
        return json.dumps(value)
    if not isinstance(value, str) or not value:
        raise ValueError(f"{name} must be a string")
    return value


_response_format = partial(format_of, field="response_format", inner="json_schema")
_output_format = partial(format_of, field="output_config.format")
ResponseFormat: TypeAlias = Annotated[Structure | None, PlainValidator(_response_format)]
OutputFormat: TypeAlias = Annotated[Structure | None, PlainValidator(_output_format)]
StructuredOutputs: TypeAlias = Annotated[Structure | None, PlainValidator(structured_outputs)]

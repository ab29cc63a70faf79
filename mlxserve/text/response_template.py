"""Reads the format of calls that a tokenizer's own `response_template` describes.

transformers parses whole answers by it. Its fields of tool calls become a row of `formats` where the
row can say the same: literal markers around JSON, or around a list of calls in Python's syntax.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mlxserve.text.parsing.formats import CallFormat, Syntax

_NAME, _FIELD = "response_template", "tool_calls"
_SYNTAXES = {"json": Syntax.JSON, "python-call-list": Syntax.PYTHON}


def format_in(spec: Any) -> CallFormat | None:
    """Return the format of a `response_template`; None for none, or one that a row cannot express."""
    fields = spec.get("fields") if isinstance(spec, dict) else None
    field = fields.get(_FIELD) if isinstance(fields, dict) else None
    if not isinstance(field, dict):
        return None
    starts, ends = _literals(field.get("open")), _literals(field.get("close"))
    syntax = _SYNTAXES.get(str(field.get("content")))
    if not starts or syntax is None:
        return None
    if syntax is Syntax.PYTHON:
        # The brackets are a part of the content, or of the markers.
        starts, ends = (tuple(each.strip("[]") for each in markers) for markers in (starts, ends))
        row = CallFormat(_NAME, syntax, call="$name($arguments)", starts=starts, ends=ends)
    else:
        call = f'\n{{"name": "$name", "{_arguments_key(field)}": $arguments}}\n'
        row = CallFormat(_NAME, syntax, call=call, starts=starts, ends=ends)
    if syntax is Syntax.PYTHON or field.get("transform_each") is True:
        row = replace(row, call=row.call.strip(), opening="[", joint=", ", closing="]")
    return row


def _literals(value: Any) -> tuple[str, ...]:
    values = value if isinstance(value, list) else [value]
    return tuple(each for each in values if isinstance(each, str) and each.strip("[]"))


def _arguments_key(field: dict[str, Any]) -> str:
    """Return the name of the arguments in the written object, by what the transform reads."""
    return "parameters" if "parameters}" in str(field.get("transform")) else "arguments"

"""Writes calls as text, for histories of templates that ignore `tool_calls`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from mlxserve.text.parsing.formats import CallFormat, Syntax
from mlxserve.text.parsing.values import kind_of, to_json

Call: TypeAlias = tuple[str, Mapping[str, Any], str | None]  # (name, arguments, id)


def write_calls(row: CallFormat, calls: Sequence[Call]) -> str:
    """Return the calls as the model would have written them, with the markers around them."""
    written = [_call(row, number, *call) for number, call in enumerate(calls)]
    if row.joint is not None:
        written = [f"{row.opening}{row.joint.join(written)}{row.closing}"]
    between = "\n" if row.end.startswith("</") else ""
    return between.join(f"{row.start}{section}{row.end}" for section in written)


def fill(template: str, fields: Mapping[str, str]) -> str:
    return re.sub(r"\$(\w+)", lambda match: fields[match[1]], template)


def escape(row: CallFormat, text: str) -> str:
    """Escape a text for a quoted attribute, where the format has escapes."""
    return text.replace("&", "&amp;").replace('"', "&quot;") if row.block[0] else text


def _call(
    row: CallFormat, number: int, name: str, arguments: Mapping[str, Any], call_id: str | None
) -> str:
    fields = {
        "name": name,
        "id": call_id or f"call{number:05}",
        "number": str(number),
        "count": str(number + 1),
    }
    if "$parameters" in row.call:
        pairs = arguments.items()
        fields["parameters"] = "".join(_parameter(row, key, value) for key, value in pairs)
    else:
        fields["arguments"] = _arguments(row, arguments)
    return fill(row.call, fields)


def _parameter(row: CallFormat, key: str, value: Any) -> str:
    text = _text(value)
    if row.is_padded and isinstance(value, str) and text[:1] == text[-1:] == "\n":
        text = f"\n{text}\n"
    if row.is_cdata and isinstance(value, str) and set(text) & set("<&\n"):
        text = f"<![CDATA[{text}]]>"
    is_text = "true" if isinstance(value, str) else "false"
    fields = {"value": text, "string": is_text, "type": kind_of(value)}
    return fill(row.parameter, {"key": escape(row, key), **fields})


def _arguments(row: CallFormat, arguments: Mapping[str, Any]) -> str:
    match row.syntax:
        case Syntax.PYTHON:
            return ", ".join(f"{key}={_python(value)}" for key, value in arguments.items())
        case Syntax.OBJECT:
            return _quoted(row.quote, arguments)
        case Syntax.TAGS:
            return "".join(_tag(row.quote, key, value) for key, value in arguments.items()) + (
                row.quote
            )
    return to_json(arguments)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else to_json(value)


def _python(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return repr(value)
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{to_json(key)}: {_python(item)}' for key, item in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_python, value))}]"
    return to_json(value)


def _quoted(quote: str, value: Any) -> str:
    """Write a value in Gemma's object syntax."""
    if isinstance(value, str):
        return to_json(value) if quote in value else f"{quote}{value}{quote}"
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{key}:{_quoted(quote, item)}' for key, item in value.items())}}}"
    if isinstance(value, list):
        return f"[{','.join(_quoted(quote, item) for item in value)}]"
    return to_json(value)


def _tag(mark: str, key: str, value: Any) -> str:
    if isinstance(value, Mapping) and value:
        inner = "".join(_tag(mark, name, item) for name, item in value.items())
    elif isinstance(value, list) and value:
        inner = "".join(_tag(mark, "item", item) for item in value)
    else:
        inner = _text(value)
    return f"{mark}<{key}>{inner}{mark}</{key}>"

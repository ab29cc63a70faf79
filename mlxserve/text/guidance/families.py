"""Call grammars: writes each format's call, its name and arguments as a Lark grammar.

Derived from the written form in `formats`, so what is forced is what is read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

from mlxserve.text.guidance.structures import json_text
from mlxserve.text.parsing.formats import NAME, CallFormat, Syntax
from mlxserve.text.parsing.markup import Markup
from mlxserve.text.parsing.values import kinds_of
from mlxserve.text.parsing.writing import escape

Schema: TypeAlias = Mapping[str, Any]

_ANY = "/(?s:.*)/"
_CDATA = "]]></param>"
_TEXT = "text"  # name of the rule of a free text
# What a name of an argument may be, where the format has no way to quote it.
_KEYS = {
    Syntax.ELEMENTS: r'[^\s<>"][^<>"\n]*(?<!\s)',
    Syntax.PYTHON: NAME,
    Syntax.OBJECT: r'[^\s:{}\[\],<"]+',
    Syntax.TAGS: r"[^\s<>/]+",
}


def text_rules(row: CallFormat) -> Iterator[str]:
    """Yield the rules of free text up to a marker, which may be no single token."""
    end = row.parameter.partition("$value")[2].rstrip("\n") or row.quote
    if end:
        yield f"{_TEXT}[suffix={json.dumps(end)}]: {_ANY}"
    if row.is_cdata:
        yield f"cdata[suffix={json.dumps(_CDATA)}]: {_ANY}"
        yield r"UNMARKED: /[^<&\n]*/"


def lark_text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def lark_marked(markup: Markup, text: str) -> str:
    """Text in which markers that are single tokens are tokens. White space at its ends is optional."""
    core = text.strip("\n")
    before, _, after = text.partition(core) if core else (text, "", "")
    tokens = sorted(markup.token_ids, key=len, reverse=True)
    pieces = re.split(f"({'|'.join(map(re.escape, tokens))})", core) if tokens else [core]
    ids = markup.token_ids
    parts = [f"<[{ids[piece]}]>" if piece in ids else lark_text(piece) for piece in pieces if piece]
    blanks = ['"\\n"?' for _ in before], ['"\\n"?' for _ in after]
    return " ".join([*blanks[0], *parts, *blanks[1]])


def call_rule(markup: Markup, name: str, schema: Schema) -> str:
    """Return one call's rule. Raises ValueError for a name that the format cannot express."""
    row = markup.format
    assert row is not None
    names = {name: NAME}
    if row.syntax in _KEYS and not row.block[0]:
        names |= dict.fromkeys(schema["properties"], _KEYS[row.syntax])
    for tool_name, pattern in names.items():
        if not re.fullmatch(pattern, tool_name):
            raise ValueError(f"{tool_name!r} cannot be written in this model's call format")
    pieces = re.split(r"\$(\w+)", row.call)
    fields: dict[str, Callable[[], str]] = {
        "name": lambda: lark_text(name),
        "id": lambda: "/[a-zA-Z0-9]{9}/",
        "number": lambda: "/[0-9]+/",
        "count": lambda: "/[1-9][0-9]?/",
        "arguments": lambda: _arguments(markup, row, schema),
        "parameters": lambda: _parameters(schema, lambda *pair: _parameter(markup, row, *pair)),
    }
    parts = [
        fields[piece]() if at % 2 else lark_marked(markup, piece) for at, piece in enumerate(pieces)
    ]
    return " ".join(filter(None, parts))


def _json(schema: Schema) -> str:
    # Lenient: formats and keywords unknown to the compiler are ignored. Tools in the wild are full
    # of them, and a call is better than an error.
    return json_text(schema, is_lenient=True)


def _arguments(markup: Markup, row: CallFormat, schema: Schema) -> str:
    match row.syntax:
        case Syntax.PYTHON:
            return _listed(
                schema, lambda key, value: f"{lark_text(f'{key}=')} {_json(value)}", ", "
            )
        case Syntax.OBJECT:
            return _object(markup, row, schema)
        case Syntax.TAGS:
            tags = _parameters(schema, lambda *pair: _tag(markup, row, *pair))
            return f"{tags} {lark_marked(markup, row.quote)}"
    return _json(schema)


def _parameter(markup: Markup, row: CallFormat, key: str, schema: Schema) -> str:
    """Return the rule of an argument in markup of its own."""
    kinds = kinds_of(schema)
    is_text = not kinds or "string" in kinds
    kind = "string" if is_text else next(iter(sorted(kinds)))
    before, _, after = row.parameter.partition("$value")
    values = {"key": escape(row, key), "string": str(is_text).lower(), "type": kind}
    before = re.sub(r"\$(\w+)", lambda match: values[match[1]], before)
    core = after.rstrip("\n")
    blanks = '"\\n"?' if core != after else ""
    value = (
        _text(markup, schema, core) if is_text else f"{_json(schema)} {lark_exactly(markup, core)}"
    )
    if row.is_cdata and is_text and _choices(schema) is None:
        value = f'(UNMARKED {lark_text(core)} | "<![CDATA[" cdata)'
    return f"{lark_exactly(markup, before)} {value} {blanks}"


def lark_exactly(markup: Markup, text: str) -> str:
    """Like `lark_marked`, with all white space."""
    core = text.strip("\n")
    before, _, after = text.partition(core) if core else (text, "", "")
    pieces = [lark_text(before), lark_marked(markup, core), lark_text(after)]
    return " ".join(piece for piece in pieces if piece not in ("", '""'))


def _text(markup: Markup, schema: Schema, end: str) -> str:
    """Return the rule of a raw text, up to the marker that follows it."""
    choices = _choices(schema)
    if choices is not None:
        words = [word if isinstance(word, str) else json.dumps(word) for word in choices]
        listed = " | ".join(lark_text(word) if word else '""' for word in words)
        return f"({listed}) {lark_exactly(markup, end)}"
    marked = lark_marked(markup, end.strip("\n"))
    if marked.startswith("<["):
        return f"{_ANY} {marked}"
    return _TEXT


def _object(markup: Markup, row: CallFormat, schema: Schema) -> str:
    def pair(key: str, value: Schema) -> str:
        return f"{lark_text(f'{key}:')} {_member(markup, row, value)}"

    return f'"{{" {_listed(schema, pair, ",")} "}}"'


def _member(markup: Markup, row: CallFormat, schema: Schema) -> str:
    """Return a value's rule: texts in the format's quotes at any depth, all else JSON."""
    kinds, items = kinds_of(schema), schema.get("items")
    if kinds == {"string"}:
        return f"{lark_marked(markup, row.quote)} {_text(markup, schema, row.quote)}"
    if kinds == {"object"} and isinstance(schema.get("properties"), dict):
        return _object(markup, row, schema)
    if kinds == {"array"} and isinstance(items, dict):
        item = _member(markup, row, items)
        return _array(item, schema.get("minItems", 0), schema.get("maxItems"))
    return _json(schema)


def _array(item: str, minimum: int, maximum: int | None) -> str:
    if maximum == 0:
        return '"[" "]"'
    more = f'("," {item}){{{max(minimum - 1, 0)},{"" if maximum is None else maximum - 1}}}'
    inner = f"{item} {more}"
    return f'"[" {inner} "]"' if minimum else f'"[" ({inner})? "]"'


def _tag(markup: Markup, row: CallFormat, key: str, schema: Schema) -> str:
    """Return the rule of an argument in a tag of its name; objects with known members nest."""
    mark, kinds = lark_marked(markup, row.quote), kinds_of(schema)
    close = f"{mark} {lark_text(f'</{key}>')}"
    if not kinds or "string" in kinds:
        inner = f"{_text(markup, schema, row.quote)} {lark_text(f'</{key}>')}"
    elif kinds == {"object"} and schema.get("properties"):
        inner = f"{_parameters(schema, lambda *pair: _tag(markup, row, *pair))} {close}"
    else:
        inner = f"{_json(schema)} {close}"
    return f"{mark} {lark_text(f'<{key}>')} {inner}"


def _listed(schema: Schema, write: Callable[[str, Schema], str], separator: str) -> str:
    """Sequence the required properties, then any of the optional ones in order."""
    required = schema.get("required", [])
    pairs = {
        key: write(key, value if isinstance(value, dict) else {})
        for key, value in schema["properties"].items()
    }
    between = lark_text(separator)
    first = f" {between} ".join(pair for key, pair in pairs.items() if key in required)
    rest = [pair for key, pair in pairs.items() if key not in required]
    if first:
        return " ".join([first, *(f"({between} {pair})?" for pair in rest)])
    begins = [
        " ".join([pair, *(f"({between} {later})?" for later in rest[number + 1 :])])
        for number, pair in enumerate(rest)
    ]
    return f"({' | '.join(begins)})?" if begins else ""


def _parameters(schema: Schema, write: Callable[[str, Schema], str]) -> str:
    """Sequence the properties in their own markup, in the order of the schema."""
    required = schema.get("required", [])
    return " ".join(
        f"({write(key, value if isinstance(value, dict) else {})}){'' if key in required else '?'}"
        for key, value in schema["properties"].items()
    )


def _choices(schema: Schema) -> list[Any] | None:
    """The values of a schema's const or enum; None without either."""
    if "const" in schema:
        return [schema["const"]]
    choices = schema.get("enum")
    return choices if isinstance(choices, list) and choices else None

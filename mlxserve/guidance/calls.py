"""Grammars of calls: in a family's own markup, with arguments that follow the tools' schemas.

A grammar either follows the marker that opens a section of calls, or is the whole answer, marker
included, where a call is required. Formats that are not here can be made to open a call, no more.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from mlxserve.guidance.grammars import check_schema, json_text
from mlxserve.parsing.markup import Markup

_Tool: TypeAlias = Mapping[str, Any]
_Body: TypeAlias = Callable[[Markup, str, dict[str, Any]], str]  # (markup, name, schema) -> Lark


def call_grammar(
    markup: Markup, tools: Sequence[_Tool], *, is_whole: bool, repeats: bool, otherwise: str = ""
) -> str | None:
    """In Lark; None for a format that is not known here. Raises ValueError for a tool's schema.

    is_whole: the answer is calls and nothing else; else the grammar begins behind the marker
    repeats: several calls are allowed
    otherwise: in Lark, what the whole answer may be instead
    """
    body = _BODIES.get(markup.call_format or "")
    is_harmony = markup.call_format == "harmony"
    if body is None or (len(markup.call_start) != 1 and not is_harmony and not markup.is_bare):
        return None
    if markup.is_bare:
        repeats = False
        if not is_whole:
            return None  # nothing says that a call begins
    if is_harmony and not is_whole:
        return None  # a call begins with the same token as a text
    calls = []
    rules = []
    for number, tool in enumerate(tools):
        function = tool["function"]
        calls.append(f"call{number}")
        rules.append(f"call{number}: {body(markup, function['name'], _schema(function))}")
    start, end = _start(markup), _end(markup)
    inner = "call"
    if markup.call_format in _SECTIONS and repeats:
        inner = "call+"  # one section holds them all
    section = f"{inner} {end}".strip()
    if not is_whole:
        top = section
    elif repeats and inner == "call" and not is_harmony:  # which has one call in a turn
        top = f'{start} {section} ("\\n"? {start} {section})*'
    else:
        top = f"{start} {section}".strip()
    if otherwise:
        top = f"{top} | {otherwise}"
    return "\n".join(
        [
            f"start: {top}",
            f"call: {' | '.join(calls)}",
            *rules,
            *(rule for _, rule in _TEXTS.values()),
        ]
    )


_LINE = "\n"
# Free text up to a marker that is written in letters: the name and the rule.
_TEXTS = {
    end: (f"text{number}", f"text{number}[suffix={json.dumps(end)}]: /(?s:.*)/")
    for number, end in enumerate(
        ("\n</parameter>", "</parameter>", "</arg_value>", "</longcat_arg_value>", '<|"|>')
    )
}
_SECTIONS = frozenset({"kimi_k2", "minimax_m2"})


def _schema(function: Mapping[str, Any]) -> dict[str, Any]:
    """Of the arguments. What a tool did not declare, the model does not make up."""
    schema = dict(function.get("parameters") or {})
    try:
        check_schema(schema)
    except ValueError as error:
        raise ValueError(f"the parameters of {function['name']!r}: {error}") from error
    schema.setdefault("type", "object")
    schema.setdefault("properties", {})
    schema.setdefault("additionalProperties", False)
    return schema


def _json(schema: Mapping[str, Any]) -> str:
    # Formats and keywords that the compiler does not know are not followed: other servers' tools
    # are full of them, and a call is better than an error.
    return json_text(schema, is_lenient=True)


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _token(markup: Markup, text: str) -> str:
    """A marker: the one token that it is, or its letters."""
    token = markup.token_ids.get(text)
    return _text(text) if token is None else f"<[{token}]>"


def _start(markup: Markup) -> str:
    if markup.is_bare:
        return ""
    if markup.call_format != "harmony":
        return f"<[{markup.call_start[0]}]>"
    again = f'({_token(markup, "<|start|>")} "assistant")?'
    return f'{again} {_token(markup, "<|channel|>")} "commentary to=functions."'


def _end(markup: Markup) -> str:
    if markup.call_format == "harmony":
        return ""  # the token that ends a call ends the answer
    return _token(markup, markup.call_end) if markup.call_end else ""


def _json_tools(markup: Markup, name: str, schema: dict[str, Any]) -> str:  # noqa: ARG001
    head = f'{{"name": {json.dumps(name)}, "arguments": '
    return f'"\\n"? {_text(head)} {_json(schema)} "}}" "\\n"?'


def _llama3(markup: Markup, name: str, schema: dict[str, Any]) -> str:  # noqa: ARG001
    head = f'{{"name": {json.dumps(name)}, "parameters": '
    return f'{_text(head)} {_json(schema)} "}}"'


def _mistral(markup: Markup, name: str, schema: dict[str, Any]) -> str:
    return f"{_text(name)} {_token(markup, '[ARGS]')} {_json(schema)}"


def _kimi_k2(markup: Markup, name: str, schema: dict[str, Any]) -> str:
    begin = _token(markup, "<|tool_call_begin|>")
    arguments = _token(markup, "<|tool_call_argument_begin|>")
    end = _token(markup, "<|tool_call_end|>")
    return f"{begin} {_text(f'functions.{name}:')} /[0-9]+/ {arguments} {_json(schema)} {end}"


def _qwen3_coder(markup: Markup, name: str, schema: dict[str, Any]) -> str:
    end = "\n</parameter>"

    def parameter(key: str, value: Mapping[str, Any]) -> str:
        return f"{_text(f'<parameter={key}>{_LINE}')} {_value(markup, value, end)} {_text(_LINE)}"

    head = _text(f"<function={name}>\n")
    return f'"\\n"? {head} {_parameters(schema, parameter)} "</function>" "\\n"?'


def _minimax_m2(markup: Markup, name: str, schema: dict[str, Any]) -> str:
    def parameter(key: str, value: Mapping[str, Any]) -> str:
        head = _text(f'<parameter name="{key}">')
        return f"{head} {_value(markup, value, '</parameter>')} {_text(_LINE)}"

    head = _text(f'<invoke name="{name}">\n')
    return f'"\\n"? {head} {_parameters(schema, parameter)} "</invoke>" "\\n"?'


def _glm47(markup: Markup, name: str, schema: dict[str, Any]) -> str:
    key_start, key_end = _token(markup, "<arg_key>"), _token(markup, "</arg_key>")
    value_start = _token(markup, "<arg_value>")

    def parameter(key: str, value: Mapping[str, Any]) -> str:
        inner = _value(markup, value, "</arg_value>")
        return f'{key_start} {_text(key)} {key_end} "\\n"? {value_start} {inner} "\\n"?'

    return f'{_text(name)} "\\n"? {_parameters(schema, parameter)}'


def _longcat(markup: Markup, name: str, schema: dict[str, Any]) -> str:
    if not schema.get("required"):  # its parser takes a name without arguments for JSON alone
        return _json_tools(markup, name, schema)

    def parameter(key: str, value: Mapping[str, Any]) -> str:
        inner = _value(markup, value, "</longcat_arg_value>")
        head = _text(f"<longcat_arg_key>{key}</longcat_arg_key>\n<longcat_arg_value>")
        return f'{head} {inner} "\\n"?'

    return f'{_text(name)} "\\n"? {_parameters(schema, parameter)}'


def _pythonic(markup: Markup, name: str, schema: dict[str, Any]) -> str:  # noqa: ARG001
    for word in (*name.split("."), *schema["properties"]):
        if not word.isidentifier():
            raise ValueError(f"{name!r}: {word!r} is no name in Python, as this model writes calls")

    def argument(key: str, value: Mapping[str, Any]) -> str:
        return f"{_text(f'{key}=')} {_json(value)}"

    return f'{_text(f"[{name}(")} {_listed(schema, argument, ", ")} ")]"'


_QUOTE = '<|"|>'  # Gemma 4's own, so that nothing in a text has to be escaped


def _gemma4(markup: Markup, name: str, schema: dict[str, Any]) -> str:
    return f"{_text(f'call:{name}')} {_gemma4_object(markup, schema)}"


def _gemma4_object(markup: Markup, schema: Mapping[str, Any]) -> str:
    def pair(key: str, value: Mapping[str, Any]) -> str:
        return f"{_text(f'{key}:')} {_gemma4_value(markup, value)}"

    return f'"{{" {_listed(schema, pair, ",")} "}}"'


def _gemma4_value(markup: Markup, schema: Mapping[str, Any]) -> str:
    """Texts in its quotes wherever they are; what holds none is JSON."""
    kind, items = schema.get("type"), schema.get("items")
    if kind == "string":
        return f"{_token(markup, _QUOTE)} {_value(markup, schema, _QUOTE)}"
    if kind == "object" and isinstance(schema.get("properties"), dict):
        return _gemma4_object(markup, schema)
    if kind == "array" and isinstance(items, dict):
        item = _gemma4_value(markup, items)
        return _array(item, schema.get("minItems", 0), schema.get("maxItems"))
    return _json(schema)


def _array(item: str, least: int, most: int | None) -> str:
    if most == 0:
        return '"[" "]"'
    more = f'("," {item}){{{max(least - 1, 0)},{"" if most is None else most - 1}}}'
    inner = f"{item} {more}"
    return f'"[" {inner} "]"' if least else f'"[" ({inner})? "]"'


def _listed(
    schema: Mapping[str, Any], write: Callable[[str, Mapping[str, Any]], str], separator: str
) -> str:
    """What is required, then any of the rest in order, with a separator between two."""
    required = schema.get("required", [])
    pairs = {
        key: write(key, value if isinstance(value, dict) else {})
        for key, value in schema["properties"].items()
    }
    between = _text(separator)
    first = f" {between} ".join(pair for key, pair in pairs.items() if key in required)
    rest = [pair for key, pair in pairs.items() if key not in required]
    if first:
        return " ".join([first, *(f"({between} {pair})?" for pair in rest)])
    begins = [
        " ".join([pair, *(f"({between} {later})?" for later in rest[number + 1 :])])
        for number, pair in enumerate(rest)
    ]
    return f"({' | '.join(begins)})?" if begins else ""


def _parameters(schema: Mapping[str, Any], write: Callable[[str, Mapping[str, Any]], str]) -> str:
    """Each by its own markup, in the order of the schema."""
    required = schema.get("required", [])
    return " ".join(
        f"({write(key, value if isinstance(value, dict) else {})}){'' if key in required else '?'}"
        for key, value in schema["properties"].items()
    )


def _value(markup: Markup, schema: Mapping[str, Any], end: str) -> str:
    """A text stands as it is up to the marker behind it, all else as JSON."""
    if schema.get("type", "string") != "string":
        return f"{_json(schema)} {_token(markup, end)}"
    choices = schema.get("enum")
    if isinstance(choices, list) and choices:
        words = " | ".join(_text(str(choice)) for choice in choices)
        return f"({words}) {_token(markup, end)}"
    if end in markup.token_ids:
        return f"/(?s:.*)/ {_token(markup, end)}"
    return _TEXTS[end][0]


def _harmony(markup: Markup, name: str, schema: dict[str, Any]) -> str:
    constrain, message = _token(markup, "<|constrain|>"), _token(markup, "<|message|>")
    return f'{_text(name + " ")} {constrain} "json" {message} {_json(schema)}'


_BODIES: Mapping[str, _Body] = {
    "gemma4": _gemma4,
    "glm47": _glm47,
    "harmony": _harmony,
    "json_tools": _json_tools,
    "mistral": _mistral,
    "kimi_k2": _kimi_k2,
    "laguna": _glm47,
    "llama3": _llama3,
    "longcat": _longcat,
    "minimax_m2": _minimax_m2,
    "pythonic": _pythonic,
    "qwen3_coder": _qwen3_coder,
}

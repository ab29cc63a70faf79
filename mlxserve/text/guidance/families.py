"""How each model family writes one call, its name and its arguments, as a Lark grammar.

A body is the text between the markers of a call. It follows what the family's parser in mlx-lm
reads, which is not always what the model's authors intended.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

from mlxserve.text.guidance.structures import json_text
from mlxserve.text.parsing.markup import Markup

Body: TypeAlias = Callable[[Markup, str, dict[str, Any]], str]  # (markup, name, schema) -> Lark

_LINE = "\n"
# Free text up to a marker that is not a single token: marker -> (rule name, pattern of the text).
_TEXTS = {
    **{
        end: (f"text{number}", "/(?s:.*)/")
        for number, end in enumerate(
            ("\n</parameter>", "</parameter>", "</arg_value>", "</longcat_arg_value>", '<|"|>')
        )
    },
    "<|close|>": ("text_k3", "/(?s:.*)/"),
    # FunctionGemma's parser ends a call at the first closing brace, even inside a text.
    "<escape>": ("text_fg", "/[^}]*/"),
    "]]></param>": ("text_cdata", "/(?s:.*)/ & ~/(?s:.*)(<\\/param>|<\\/function>)(?s:.*)/"),
    # Muse Spark's parser reads a text that is valid JSON as JSON, so such a text is excluded.
    "</atem:parameter>": (
        "text_atem",
        r'/[^\s\d"\[{\-](?s:.*)/ & ~/(true|false|null|NaN|Infinity)\s*/'
        r" & ~/(?s:.*)<\/atem:(parameter|function_calls)>(?s:.*)/",
    ),
}
RULES = (
    *(f"{name}[suffix={json.dumps(end)}]: {text}" for end, (name, text) in _TEXTS.items()),
    # Text without markup. Its parser reads the text "null" as a missing value.
    r"UNMARKED: /[^<&\n]*/ & ~/(?i:\s*null\s*)/",
)


class Unwritable(Exception):
    """The family's format cannot express what the schema requires."""


def _json(schema: Mapping[str, Any]) -> str:
    # Lenient: formats and keywords unknown to the compiler are ignored. Tools in the wild are full
    # of them, and a call is better than an error.
    return json_text(schema, is_lenient=True)


def lark_text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def lark_token(markup: Markup, text: str) -> str:
    """A marker: as one token if it is one, else as text."""
    token = markup.token_ids.get(text)
    return lark_text(text) if token is None else f"<[{token}]>"


def _json_tools(markup: Markup, name: str, schema: dict[str, Any]) -> str:  # noqa: ARG001
    head = f'{{"name": {json.dumps(name)}, "arguments": '
    return f'"\\n"? {lark_text(head)} {_json(schema)} "}}" "\\n"?'


def _llama3(markup: Markup, name: str, schema: dict[str, Any]) -> str:  # noqa: ARG001
    head = f'{{"name": {json.dumps(name)}, "parameters": '
    return f'{lark_text(head)} {_json(schema)} "}}"'


def _mistral(markup: Markup, name: str, schema: dict[str, Any]) -> str:
    return f"{lark_text(name)} {lark_token(markup, '[ARGS]')} {_json(schema)}"


def _kimi_k2(markup: Markup, name: str, schema: dict[str, Any]) -> str:
    begin = lark_token(markup, "<|tool_call_begin|>")
    arguments = lark_token(markup, "<|tool_call_argument_begin|>")
    end = lark_token(markup, "<|tool_call_end|>")
    return f"{begin} {lark_text(f'functions.{name}:')} /[0-9]+/ {arguments} {_json(schema)} {end}"


def _qwen3_coder(markup: Markup, name: str, schema: dict[str, Any]) -> str:
    end = "\n</parameter>"

    def parameter(key: str, value: Mapping[str, Any]) -> str:
        return f"{lark_text(f'<parameter={key}>{_LINE}')} {_value(markup, value, end)} {lark_text(_LINE)}"

    head = lark_text(f"<function={name}>\n")
    return f'"\\n"? {head} {_parameters(schema, parameter)} "</function>" "\\n"?'


def _minimax_m2(markup: Markup, name: str, schema: dict[str, Any]) -> str:
    def parameter(key: str, value: Mapping[str, Any]) -> str:
        head = lark_text(f'<parameter name="{key}">')
        return f"{head} {_value(markup, value, '</parameter>')} {lark_text(_LINE)}"

    head = lark_text(f'<invoke name="{name}">\n')
    return f'"\\n"? {head} {_parameters(schema, parameter)} "</invoke>" "\\n"?'


def _glm47(markup: Markup, name: str, schema: dict[str, Any]) -> str:
    key_start, key_end = lark_token(markup, "<arg_key>"), lark_token(markup, "</arg_key>")
    value_start = lark_token(markup, "<arg_value>")

    def parameter(key: str, value: Mapping[str, Any]) -> str:
        inner = _value(markup, value, "</arg_value>")
        return f'{key_start} {lark_text(key)} {key_end} "\\n"? {value_start} {inner} "\\n"?'

    return f'{lark_text(name)} "\\n"? {_parameters(schema, parameter)}'


def _longcat(markup: Markup, name: str, schema: dict[str, Any]) -> str:
    if not schema.get("required"):  # its parser accepts a call without arguments only as JSON
        return _json_tools(markup, name, schema)

    def parameter(key: str, value: Mapping[str, Any]) -> str:
        inner = _value(markup, value, "</longcat_arg_value>")
        head = lark_text(f"<longcat_arg_key>{key}</longcat_arg_key>\n<longcat_arg_value>")
        return f'{head} {inner} "\\n"?'

    return f'{lark_text(name)} "\\n"? {_parameters(schema, parameter)}'


def _pythonic(markup: Markup, name: str, schema: dict[str, Any]) -> str:  # noqa: ARG001
    for word in (*name.split("."), *schema["properties"]):
        if not word.isidentifier():
            raise ValueError(
                f"{name!r}: {word!r} is not a Python identifier, and this model writes calls in "
                "Python syntax"
            )

    def argument(key: str, value: Mapping[str, Any]) -> str:
        return f"{lark_text(f'{key}=')} {_json(value)}"

    return f'{lark_text(f"[{name}(")} {_listed(schema, argument, ", ")} ")]"'


_QUOTE = '<|"|>'  # Gemma 4's own quote, so that texts need no escaping


def _gemma4(markup: Markup, name: str, schema: dict[str, Any]) -> str:
    return f"{lark_text(f'call:{name}')} {_gemma4_object(markup, schema)}"


def _gemma4_object(markup: Markup, schema: Mapping[str, Any]) -> str:
    def pair(key: str, value: Mapping[str, Any]) -> str:
        return f"{lark_text(f'{key}:')} {_gemma4_value(markup, value)}"

    return f'"{{" {_listed(schema, pair, ",")} "}}"'


def _gemma4_value(markup: Markup, schema: Mapping[str, Any]) -> str:
    """Texts in Gemma 4's quotes at any depth; values without texts are JSON."""
    kind, items = schema.get("type"), schema.get("items")
    if kind == "string":
        return f"{lark_token(markup, _QUOTE)} {_value(markup, schema, _QUOTE)}"
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
    """The required properties, then any of the optional ones in order, joined by a separator."""
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


def _parameters(schema: Mapping[str, Any], write: Callable[[str, Mapping[str, Any]], str]) -> str:
    """Each property in its own markup, in the order of the schema."""
    required = schema.get("required", [])
    return " ".join(
        f"({write(key, value if isinstance(value, dict) else {})}){'' if key in required else '?'}"
        for key, value in schema["properties"].items()
    )


def _value(markup: Markup, schema: Mapping[str, Any], end: str) -> str:
    """A text is written verbatim up to the marker that follows it; other values as JSON."""
    if schema.get("type", "string") != "string":
        return f"{_json(schema)} {lark_token(markup, end)}"
    choices = schema.get("enum")
    if isinstance(choices, list) and choices:
        words = " | ".join(lark_text(str(choice)) for choice in choices)
        return f"({words}) {lark_token(markup, end)}"
    if end in markup.token_ids:
        return f"/(?s:.*)/ {lark_token(markup, end)}"
    return _TEXTS[end][0]


def _harmony(markup: Markup, name: str, schema: dict[str, Any]) -> str:
    constrain, message = lark_token(markup, "<|constrain|>"), lark_token(markup, "<|message|>")
    return f'{lark_text(name + " ")} {constrain} "json" {message} {_json(schema)}'


def _function_gemma(markup: Markup, name: str, schema: dict[str, Any]) -> str:
    """Scalars only: its parser ends a value at the next comma and the call at a brace."""
    _check_names((name, *schema["properties"]), r"\w+")

    def pair(key: str, value: Mapping[str, Any]) -> str:
        return f"{lark_text(f'{key}:')} {_plain(markup, value)}"

    kept = _without_optional(schema, lambda value: _plain(markup, value))
    return f'{lark_text(f"call:{name}")} "{{" {_listed(kept, pair, ",")} "}}"'


def _plain(markup: Markup, schema: Mapping[str, Any]) -> str:
    """A quoted text, or a JSON scalar. Raises Unwritable."""
    choices, kinds = _choices(schema), _kinds(schema)
    if choices is not None:
        words = [_plain_word(markup, choice) for choice in choices if not _is_cut(choice)]
        if not words:
            raise Unwritable
        return f"({' | '.join(words)})"
    if "string" in kinds or not kinds:
        return f"{lark_token(markup, _ESCAPE)} {_value(markup, {}, _ESCAPE)}"
    short = [kind for kind in kinds if kind not in ("object", "array")]
    if not short or _is_composed(schema):
        raise Unwritable
    return _json({**schema, "type": short})


_ESCAPE = "<escape>"


def _is_cut(value: Any) -> bool:
    """Whether the family's parser would cut this value off."""
    text = value if isinstance(value, str) else json.dumps(value)
    return "}" in text or _ESCAPE in text or ("," in text and not isinstance(value, str))


def _plain_word(markup: Markup, value: Any) -> str:
    if not isinstance(value, str):
        return lark_text(json.dumps(value))
    quote = lark_token(markup, _ESCAPE)
    return f"{quote} {lark_text(value)} {quote}" if value else f"{quote} {quote}"


def _kimi_k3(markup: Markup, name: str, schema: dict[str, Any]) -> str:
    begin, close = lark_token(markup, "<|open|>"), lark_token(markup, "<|close|>")
    sep = lark_token(markup, "<|sep|>")

    def argument(key: str, value: Mapping[str, Any]) -> str:
        kind, inner = _typed(markup, value)
        head = lark_text(f'argument key="{_attribute(key)}" type="{kind}"')
        return f'{begin} {head} {sep} {inner} "argument" {sep} {_BLANKS}'

    head = lark_text(f'call tool="{_attribute(name)}" index="')
    arguments = _parameters(schema, argument)
    return (
        f"{_BLANKS} {begin} {head} /[1-9][0-9]?/ {lark_text(_QUOTED)} {sep} {_BLANKS} {arguments} "
        f'{close} "call" {sep} {_BLANKS}'
    )


def _typed(markup: Markup, schema: Mapping[str, Any]) -> tuple[str, str]:
    """(declared type, value): the parser reads values not declared as strings as JSON."""
    choices, kinds = _choices(schema), _kinds(schema)
    if choices is not None and all(isinstance(choice, str) for choice in choices):
        return "string", _value(markup, {"enum": choices}, "<|close|>")
    if choices is None and not _is_composed(schema) and ("string" in kinds or not kinds):
        return "string", _value(markup, {}, "<|close|>")
    told = next((kind for kind in kinds if kind != "string"), "object")
    return told, f"{_json(schema)} {lark_token(markup, '<|close|>')}"


_BLANKS = "/[ \\n]{0,8}/"
_QUOTED = '"'


def _attribute(text: str) -> str:
    return text.replace("&", "&amp;").replace('"', "&quot;")


def _minicpm5(markup: Markup, name: str, schema: dict[str, Any]) -> str:  # noqa: ARG001
    _check_names((name, *schema["properties"]), r'[^"<>]+')

    def parameter(key: str, value: Mapping[str, Any]) -> str:
        head = lark_text(f'<param name="{key}">')
        return f'{head} {_marked_up(value)} "\\n"?'

    kept = _without_optional(schema, _marked_up)
    return f'{lark_text(_QUOTED + name + _QUOTED + ">")} "\\n"? {_parameters(kept, parameter)}'


def _marked_up(schema: Mapping[str, Any]) -> str:
    """A text verbatim, or in CDATA if it contains what looks like markup; other values as JSON."""
    choices, kinds = _choices(schema), _kinds(schema)
    if _is_composed(schema):
        raise Unwritable
    if kinds and "string" not in kinds:
        return f'{_json(schema)} "</param>"'
    if choices is not None:
        words = [word for word in choices if isinstance(word, str) and _survives(word)]
        if not words:
            raise Unwritable
        return f"({' | '.join(map(_cdata, words))})"
    return f'(UNMARKED "</param>" | "<![CDATA[" {_TEXTS["]]></param>"][0]})'


def _survives(text: str) -> bool:
    return text == text.strip() and text.lower() != "null" and "</" not in text


def _cdata(text: str) -> str:
    if set(text) & set("<&\n"):
        return lark_text(f"<![CDATA[{text}]]></param>")
    return lark_text(f"{text}</param>")


def _muse_spark(markup: Markup, name: str, schema: dict[str, Any]) -> str:  # noqa: ARG001
    _check_names((name, *schema["properties"]), r'[^"<>]+')

    def parameter(key: str, value: Mapping[str, Any]) -> str:
        return f"{lark_text(f'<atem:parameter name={_QUOTED}{key}{_QUOTED}>')} {_read_as_json(value)} {_BLANKS}"

    head = lark_text(f"<atem:invoke name={_QUOTED}{name}{_QUOTED}>")
    return f'{_BLANKS} {head} {_BLANKS} {_parameters(schema, parameter)} "</atem:invoke>" {_BLANKS}'


def _read_as_json(schema: Mapping[str, Any]) -> str:
    """JSON. A text may also be verbatim, unless that would be read as another type."""
    as_json = f'{_json(schema)} "</atem:parameter>"'
    kinds = _kinds(schema)
    is_listed = _choices(schema) is not None or _is_composed(schema)
    if is_listed or (kinds and "string" not in kinds):
        return as_json
    return f"({_TEXTS['</atem:parameter>'][0]} | {as_json})"


def _choices(schema: Mapping[str, Any]) -> list[Any] | None:
    """The values of a schema's const or enum; None without either."""
    if "const" in schema:
        return [schema["const"]]
    choices = schema.get("enum")
    return choices if isinstance(choices, list) and choices else None


def _kinds(schema: Mapping[str, Any]) -> list[str]:
    """The types that a schema allows; empty if it names none."""
    kinds = schema.get("type", [])
    return [kinds] if isinstance(kinds, str) else list(kinds)


def _is_composed(schema: Mapping[str, Any]) -> bool:
    """Whether its types depend on subschemas."""
    return any(word in schema for word in ("anyOf", "oneOf", "allOf", "$ref", "not"))


def _check_names(names: Iterable[str], pattern: str) -> None:
    for name in names:
        if not re.fullmatch(pattern, name):
            raise ValueError(f"{name!r} cannot be written in this model's call format")


def _without_optional(
    schema: Mapping[str, Any], write: Callable[[Mapping[str, Any]], str]
) -> dict[str, Any]:
    """A schema without the optional properties that cannot be written."""
    required = schema.get("required", [])

    def is_kept(key: str, value: Mapping[str, Any]) -> bool:
        try:
            write(value if isinstance(value, dict) else {})
        except Unwritable:
            return key in required
        return True

    kept = {key: value for key, value in schema["properties"].items() if is_kept(key, value)}
    return {**schema, "properties": kept}


BODIES: Mapping[str, Body] = {
    "function_gemma": _function_gemma,
    "gemma4": _gemma4,
    "glm47": _glm47,
    "harmony": _harmony,
    "json_tools": _json_tools,
    "mistral": _mistral,
    "kimi_k2": _kimi_k2,
    "kimi_k3": _kimi_k3,
    "laguna": _glm47,
    "llama3": _llama3,
    "longcat": _longcat,
    "minicpm5": _minicpm5,
    "minimax_m2": _minimax_m2,
    "muse_spark": _muse_spark,
    "pythonic": _pythonic,
    "qwen3_coder": _qwen3_coder,
}

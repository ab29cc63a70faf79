"""Arguments in each family's markup: texts, scalars, and what the format cannot express."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest

from mlxserve.text.guidance.calls import call_grammar
from mlxserve.text.guidance.grammars import Grammars
from mlxserve.text.guidance.matcher_host import RowOutcome
from mlxserve.text.parsing.parser import TurnParser
from mlxserve.text.parsing.turn import AssistantTurn
from mlxserve.text.tokenizer import Tokenizer
from tests.text.guidance.call_formats import (
    LOOK,
    calls_of,
    compile_lark,
    markup,
    outcome,
    tool,
)


def test_qwen_coder_texts_are_unrestricted_up_to_the_end_marker(
    tokenizer: Tokenizer, grammars: Grammars
) -> None:
    parameters = {"type": "object", "properties": {"code": {"type": "string"}}}
    tools = [tool("run", parameters)]
    source = call_grammar(markup("qwen3_coder"), tools, is_whole=False, repeats=False)
    matcher = compile_lark(grammars, source)
    text = (
        "\n<function=run>\n<parameter=code>\nif a < b:\n    print('</param>')\n</parameter>\n"
        "</function>\n</tool_call>"
    )
    token_ids = tokenizer.encode(text)
    assert outcome(matcher, token_ids) is RowOutcome.STOPPED


GEMMA = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "inner": {"type": "object", "properties": {"a": {"type": "string", "enum": ["x,b:1"]}}},
        "list": {"type": "array", "items": {"type": "string", "enum": ["{p}"]}, "minItems": 1},
    },
}


@pytest.mark.parametrize(
    ("name", "schema", "text", "arguments"),
    [
        (
            "gemma4",
            GEMMA,
            'call:run{inner:{a:<|"|>x,b:1<|"|>},list:[<|"|>{p}<|"|>,<|"|>{p}<|"|>]}</tool_call>',
            {"inner": {"a": "x,b:1"}, "list": ["{p}", "{p}"]},
        ),
        (
            "gemma4",
            GEMMA,
            'call:run{text:<|"|>say "a, b:1" {<|"|>}</tool_call>',
            {"text": 'say "a, b:1" {'},
        ),
        (
            "pythonic",
            {
                "type": "object",
                "properties": {"a": {"type": "boolean"}, "b": {"type": "string"}, "c": {}},
            },
            '[run(b="x, c=1)]", c=[null])]</tool_call>',
            {"b": "x, c=1)]", "c": [None]},
        ),
        ("pythonic", {"type": "object", "properties": {}}, "[run()]</tool_call>", {}),
        (
            "function_gemma",
            {
                "type": "object",
                "properties": {
                    "a": {"type": "string"},
                    "b": {"type": ["number", "null"]},
                    "c": {"enum": ["x,{y", 2, "}"]},
                    "d": {"type": "array"},
                },
            },
            "call:run{a:<escape>say: a, {b<escape>,b:-2.5,c:<escape>x,{y<escape>}</tool_call>",
            {"a": "say: a, {b", "b": -2.5, "c": "x,{y"},
        ),
        (
            "kimi_k3",
            {
                "type": "object",
                "properties": {
                    'a"&b': {"type": ["null", "string"]},
                    "b": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
                    "c": {"type": "array", "items": {"type": "string"}},
                },
            },
            '\n  <|open|>call tool="run" index="12"<|sep|>\n    <|open|>argument key="a&quot;&amp;b" '
            'type="string"<|sep|>5 <b>\n"<|close|>argument<|sep|><|open|>argument key="b" '
            'type="object"<|sep|>"x"<|close|>argument<|sep|><|open|>argument key="c" '
            'type="array"<|sep|>["y"]<|close|>argument<|sep|><|close|>call<|sep|>'
            "<|close|>tools<|sep|>",
            {'a"&b': '5 <b>\n"', "b": "x", "c": ["y"]},
        ),
        (
            "minicpm5",
            {
                "type": "object",
                "properties": {
                    "a": {"type": "string"},
                    "b": {"type": "string"},
                    "c": {"enum": ["x<y", "z"]},
                    "d": {"type": "object", "properties": {"n": {"type": "integer"}}},
                },
            },
            '"run"><param name="a">say "a" > b</param>\n<param name="b"><![CDATA[if a < b & c:\n'
            '    </p> ]] >]]></param><param name="c"><![CDATA[x<y]]></param>'
            '<param name="d">{"n": 1}</param></tool_call>',
            {
                "a": 'say "a" > b',
                "b": "if a < b & c:\n    </p> ]] >",
                "c": "x<y",
                "d": {"n": 1},
            },
        ),
        (
            "muse_spark",
            {
                "type": "object",
                "properties": {
                    "a": {"type": "string"},
                    "b": {"type": "string"},
                    "c": {"enum": ["5"]},
                    "d": {"type": "array", "items": {"type": "integer"}},
                },
            },
            '<atem:invoke name="run">\n<atem:parameter name="a">truer <b>\n&amp;</atem:parameter>\n'
            '<atem:parameter name="b">"true"</atem:parameter><atem:parameter name="c">"5"'
            '</atem:parameter><atem:parameter name="d">[1, 2]</atem:parameter></atem:invoke>'
            "</tool_call>",
            {"a": "truer <b>\n&amp;", "b": "true", "c": "5", "d": [1, 2]},
        ),
    ],
)
def test_allowed_arguments_are_parsed_as_they_were_meant(
    name: str,
    schema: dict[str, Any],
    text: str,
    arguments: dict[str, Any],
    tokenizer: Tokenizer,
    grammars: Grammars,
) -> None:
    family = markup(name)
    if not text.endswith(family.call_end):
        family = replace(family, call_end="</tool_call>")
    tools = [tool("run", schema)]
    source = call_grammar(family, tools, is_whole=False, repeats=False)
    matcher = compile_lark(grammars, source)
    token_ids = tokenizer.encode(text)
    assert outcome(matcher, token_ids) is not RowOutcome.REFUSED
    parser = TurnParser(family, AssistantTurn(tools=tools))
    events = [*parser.push(f"<tool_call>{text}"), *parser.finish()]
    (call,) = calls_of(events)
    assert json.loads(call.arguments) == arguments


TEXT = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
COUNT = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


@pytest.mark.parametrize(
    ("name", "schema", "text"),
    [
        ("function_gemma", TEXT, "call:run{a:<escape>a}b<escape>}"),  # cut at the brace
        ("function_gemma", TEXT, "call:run{a:word}"),  # no quotes
        ("function_gemma", TEXT, "call:run{}"),
        ("function_gemma", COUNT, "call:run{a:1.5}"),
        ("function_gemma", COUNT, "call:other{a:1}"),
        ("kimi_k3", TEXT, '<|open|>call tool="run" index="1"<|sep|><|close|>call<|sep|>'),
        ("kimi_k3", COUNT, '<|open|>call tool="run" index="1"<|sep|><|open|>argument key="a" '
         'type="integer"<|sep|>"1"<|close|>argument<|sep|>'),
        ("kimi_k3", COUNT, '<|open|>call tool="run" index="1"<|sep|><|open|>argument key="b" '),
        ("kimi_k3", TEXT, '<|open|>call tool="run" index="0"'),
        ("minicpm5", TEXT, '"run"><param name="a">a < b</param>'),  # without CDATA
        ("minicpm5", TEXT, '"run"><param name="a">NULL</param>'),  # would be none
        ("minicpm5", TEXT, '"run"><param name="a"><![CDATA[a</param>'),
        ("minicpm5", COUNT, '"run"><param name="a">x</param>'),
        ("minicpm5", TEXT, '"run"></function>'),
        ("muse_spark", TEXT, '<atem:invoke name="run"><atem:parameter name="a">5</atem:'),
        ("muse_spark", TEXT, '<atem:invoke name="run"><atem:parameter name="a">null</atem:parameter>\n</atem:invoke>'),
        ("muse_spark", COUNT, '<atem:invoke name="run"><atem:parameter name="a">"5"</atem:'),
        ("muse_spark", TEXT, '<atem:invoke name="run"></atem:invoke>'),
        ("muse_spark", TEXT, '<atem:invoke name="other">'),
    ],
)  # fmt: skip
def test_arguments_that_would_be_misparsed_are_not_allowed(
    name: str, schema: dict[str, Any], text: str, tokenizer: Tokenizer, grammars: Grammars
) -> None:
    tools = [tool("run", schema)]
    source = call_grammar(markup(name), tools, is_whole=False, repeats=False)
    matcher = compile_lark(grammars, source)
    token_ids = tokenizer.encode(text)
    assert outcome(matcher, token_ids) is RowOutcome.REFUSED


@pytest.mark.parametrize(
    ("name", "parameter"),
    [
        ("function_gemma", {"type": "array", "items": {"type": "integer"}}),
        ("function_gemma", {"enum": ["}", [1, 2]]}),
        ("function_gemma", {"anyOf": [{"type": "integer"}], "type": "integer"}),
        ("minicpm5", {"anyOf": [{"type": "string"}, {"type": "integer"}]}),
        ("minicpm5", {"enum": ["null"]}),
    ],
)
def test_a_parameter_the_format_cannot_express_is_omitted_unless_required(
    name: str, parameter: dict[str, Any]
) -> None:
    schema: dict[str, Any] = {"type": "object", "properties": {"a": parameter, "b": {}}}
    tools = [tool("run", schema)]
    source = call_grammar(markup(name), tools, is_whole=False, repeats=False)
    assert source is not None
    assert re.search(r"\bb\b", source)
    assert not re.search(r'a:|"a', source)
    schema["required"] = ["a"]
    assert call_grammar(markup(name), tools, is_whole=False, repeats=False) is None


@pytest.mark.parametrize("name", ["function_gemma", "minicpm5", "muse_spark"])
def test_a_name_the_format_cannot_express_is_refused(name: str) -> None:
    schema = {"type": "object", "properties": {'a"<': {"type": "string"}}}
    tools = [tool("run", schema)]
    with pytest.raises(ValueError, match="cannot be written in"):
        call_grammar(markup(name), tools, is_whole=True, repeats=True)


def test_pythonic_calls_refuse_names_that_are_not_identifiers() -> None:
    tools = [tool("look-up", LOOK)]
    with pytest.raises(ValueError, match="not a Python identifier"):
        call_grammar(markup("pythonic"), tools, is_whole=True, repeats=True)

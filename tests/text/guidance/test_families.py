"""Arguments in each family's markup: texts, scalars, and what the format cannot express."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mlxserve.text.guidance.calls import call_grammar
from mlxserve.text.guidance.grammars import Grammars
from mlxserve.text.guidance.matcher_host import RowOutcome
from mlxserve.text.parsing.parser import TurnParser
from mlxserve.text.parsing.turn import AssistantTurn
from mlxserve.text.tokenizer import Tokenizer
from tests.text.guidance.call_formats import (
    FAMILIES,
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
            'call:run{inner:{a:<|"|>x,b:1<|"|>},list:[<|"|>{p}<|"|>,<|"|>{p}<|"|>]}<tool_call|>',
            {"inner": {"a": "x,b:1"}, "list": ["{p}", "{p}"]},
        ),
        (
            "gemma4",
            GEMMA,
            'call:run{text:<|"|>say "a, b:1" {<|"|>}<tool_call|>',
            {"text": 'say "a, b:1" {'},
        ),
        (
            "pythonic",
            {
                "type": "object",
                "properties": {"a": {"type": "boolean"}, "b": {"type": "string"}, "c": {}},
            },
            '[run(b="x, c=1)]", c=[null])]<|tool_call_end|>',
            {"b": "x, c=1)]", "c": [None]},
        ),
        ("pythonic", {"type": "object", "properties": {}}, "[run()]<|tool_call_end|>", {}),
        (
            "function_gemma",
            {
                "type": "object",
                "properties": {
                    "a": {"type": "string"},
                    "b": {"type": ["number", "null"]},
                    "c": {"enum": ["x,{y", "}"]},
                    "d": {"type": "array", "items": {"type": "integer"}},
                },
            },
            "call:run{a:<escape>say: a, {b}<escape>,b:-2.5,c:<escape>x,{y<escape>,d:[1]}"
            "<end_function_call>",
            {"a": "say: a, {b}", "b": -2.5, "c": "x,{y", "d": [1]},
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
            '<|open|>call tool="run" index="12"<|sep|><|open|>argument key="a&quot;&amp;b" '
            'type="string"<|sep|>5 <b>\n"<|close|>argument<|sep|><|open|>argument key="b" '
            'type="string"<|sep|>x<|close|>argument<|sep|><|open|>argument key="c" '
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
            '    </p> ]] >]]></param><param name="c">x<y</param>'
            '<param name="d">{"n": 1}</param></function>',
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
            '<atem:parameter name="b">true</atem:parameter><atem:parameter name="c">5'
            '</atem:parameter><atem:parameter name="d">[1, 2]</atem:parameter></atem:invoke>'
            "</atem:function_calls>",
            {"a": "truer <b>\n&amp;", "b": "true", "c": "5", "d": [1, 2]},
        ),
        (
            "deepseek_v32",
            {
                "type": "object",
                "properties": {"a": {"type": "string"}, "n": {"type": ["integer", "null"]}},
            },
            '\n<｜DSML｜invoke name="run">\n<｜DSML｜parameter name="a" string="true">5\n'
            '</｜DSML｜parameter>\n<｜DSML｜parameter name="n" string="false">null'
            "</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>",
            {"a": "5\n", "n": None},
        ),
        (
            "minimax_m3",
            {
                "type": "object",
                "properties": {
                    "a": {"type": "string"},
                    "o": {"type": "object", "properties": {"n": {"type": "integer"}}},
                    "l": {"type": "array", "items": {"type": "string"}},
                },
            },
            ']<]minimax[>[<invoke name="run">]<]minimax[>[<a> x < y\n]<]minimax[>[</a>'
            "]<]minimax[>[<o>]<]minimax[>[<n>1]<]minimax[>[</n>]<]minimax[>[</o>"
            ']<]minimax[>[<l>["b"]]<]minimax[>[</l>]<]minimax[>[</invoke>]<]minimax[>[</tool_call>',
            {"a": " x < y\n", "o": {"n": 1}, "l": ["b"]},
        ),
        (
            "seed_oss",
            {"type": "object", "properties": {"a": {"type": "string"}}},
            "\n<function=run>\n<parameter=a>  x\n</parameter>\n</function></seed:tool_call>",
            {"a": "  x\n"},
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
    tools = [tool("run", schema)]
    source = call_grammar(family, tools, is_whole=False, repeats=False)
    matcher = compile_lark(grammars, source)
    token_ids = tokenizer.encode(text)
    assert outcome(matcher, token_ids) is not RowOutcome.REFUSED
    parser = TurnParser(family, AssistantTurn(tools=tools))
    events = [*parser.push(f"{FAMILIES[name].start}{text}"), *parser.finish()]
    (call,) = calls_of(events)
    assert json.loads(call.arguments) == arguments


TEXT = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
COUNT = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def test_arguments_that_would_be_misparsed_are_not_allowed(
    tokenizer: Tokenizer, grammars: Grammars
) -> None:
    for name, schema, text in [
        ("function_gemma", TEXT, "call:run{a:word}"),  # no quotes
        ("function_gemma", TEXT, "call:run{}"),
        ("function_gemma", COUNT, "call:run{a:1.5}"),
        ("function_gemma", COUNT, "call:other{a:1}"),
        ("kimi_k3", TEXT, '<|open|>call tool="run" index="1"<|sep|><|close|>call<|sep|>'),
        (
            "kimi_k3",
            COUNT,
            '<|open|>call tool="run" index="1"<|sep|><|open|>argument key="a" '
            'type="integer"<|sep|>"1"<|close|>argument<|sep|>',
        ),
        ("kimi_k3", COUNT, '<|open|>call tool="run" index="1"<|sep|><|open|>argument key="b" '),
        ("kimi_k3", TEXT, '<|open|>call tool="run" index="0"'),
        ("minicpm5", TEXT, '"run"><param name="a">a < b</param>'),  # without CDATA
        ("minicpm5", COUNT, '"run"><param name="a">x</param>'),
        ("minicpm5", TEXT, '"run"></function>'),
        ("muse_spark", COUNT, '<atem:invoke name="run"><atem:parameter name="a">"5"</atem:'),
        ("muse_spark", TEXT, '<atem:invoke name="run"></atem:invoke>'),
        ("muse_spark", TEXT, '<atem:invoke name="other">'),
        (
            "deepseek_v32",
            COUNT,
            '<｜DSML｜invoke name="run">\n<｜DSML｜parameter name="a" string="true"',
        ),
        ("glm47", TEXT, "run</tool_call>"),
        ("mistral", COUNT, 'run[ARGS]{"a": "1"'),
    ]:
        tools = [tool("run", schema)]
        source = call_grammar(markup(name), tools, is_whole=False, repeats=False)
        matcher = compile_lark(grammars, source)
        token_ids = tokenizer.encode(text)
        assert outcome(matcher, token_ids) is RowOutcome.REFUSED, name


@pytest.mark.parametrize("name", ["qwen3_coder", "minicpm5", "muse_spark", "minimax_m3"])
def test_a_parameter_the_format_cannot_express_is_refused(name: str) -> None:
    schema = {"type": "object", "properties": {'a"<': {"type": "string"}}}
    tools = [tool("run", schema)]
    with pytest.raises(ValueError, match="cannot be written in"):
        call_grammar(markup(name), tools, is_whole=True, repeats=True)


def test_every_format_writes_the_names_that_the_api_accepts() -> None:
    for name in FAMILIES:
        for called in ["look-up", "fs/read", "github.issue", "a:b"]:
            assert call_grammar(markup(name), [tool(called, LOOK)], is_whole=True, repeats=True), (
                name,
                called,
            )

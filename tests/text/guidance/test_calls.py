"""Calls that a grammar allows are calls that the parser reads, with arguments by their schema."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from random import Random
from typing import Any

import jsonschema
import pytest
from mlx_lm.tool_parsers import (
    function_gemma,
    gemma4,
    glm47,
    json_tools,
    kimi_k2,
    kimi_k3,
    longcat,
    minicpm5,
    minimax_m2,
    mistral,
    muse_spark,
    pythonic,
    qwen3_coder,
)

from mlxserve.errors import InvalidParameter
from mlxserve.hub.embedded import model_path
from mlxserve.sampling_params import SamplingParams, Structure, StructureKind
from mlxserve.text.guidance.calls import call_grammar
from mlxserve.text.guidance.grammars import Grammars
from mlxserve.text.guidance.guide import AnswerGuide
from mlxserve.text.guidance.planner import Planner
from mlxserve.text.parsing.markup import Markup, Part
from mlxserve.text.parsing.parser import TurnParser
from mlxserve.text.parsing.readers import ReasoningDelta, TextDelta
from mlxserve.text.parsing.turn import AssistantTurn, ToolCallDelta, ToolChoice, join_calls
from mlxserve.text.tokenizer import Tokenizer

START, END = 2040, 2  # the embedded model's <tool_call> stands for each family's marker
LOOK = {
    "type": "object",
    "properties": {
        "at": {"type": "string", "enum": ["here", "zu Haus"]},
        "n": {"type": "integer", "minimum": 0, "maximum": 20},
        "deep": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    },
    "required": ["at", "n"],
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "look", "parameters": LOOK}},
    {"type": "function", "function": {"name": "rest"}},
]
FAMILIES = {
    "json_tools": json_tools,
    "mistral": mistral,
    "kimi_k2": kimi_k2,
    "qwen3_coder": qwen3_coder,
    "minimax_m2": minimax_m2,
    "glm47": glm47,
    "longcat": longcat,
    "pythonic": pythonic,
    "gemma4": gemma4,
    "function_gemma": function_gemma,
    "kimi_k3": kimi_k3,
    "minicpm5": minicpm5,
    "muse_spark": muse_spark,
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(model_path())


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Iterator[Grammars]:
    found = Grammars(tokenizer, tokenizer.vocab_size)
    yield found
    found.close()


def drawn(
    guide: AnswerGuide, rng: Random, most: int, *, may_be_free: bool = False
) -> Iterator[int]:
    """Allowed tokens at random, as if a model had chosen them, up to where the answer may end."""
    for _ in range(most):
        mask = guide.mask()
        if mask is None:
            assert may_be_free, "nothing holds it any more"
            return
        allowed = [t for t in range(len(mask) * 8) if mask[t >> 3] >> (t & 7) & 1]
        token = END if END in allowed else rng.choice(allowed)
        if token == END:
            return
        guide.read([token])
        yield token


def markup(name: str) -> Markup:
    module: Any = FAMILIES[name]
    return Markup(
        edges={Part.TEXT: (("<tool_call>", Part.CALL),)},
        call_format=name,
        call_end=module.tool_call_end,
        parse_call=module.parse_tool_call,
        call_start=(START,),
        token_ids={"<tool_call>": START, "</tool_call>": 2041},
    )


def written(tokenizer: Tokenizer, grammars: Grammars, source: str, seed: int) -> str:
    """What somebody writes who picks any token that the grammar allows."""
    rng = Random(seed)
    structure = Structure(StructureKind.GRAMMAR, source, "tools")
    matcher = asyncio.run(grammars.compile(structure))
    token_ids: list[int] = []
    while len(token_ids) < 2_000:
        mask = matcher.compute_bitmask()
        allowed = [t for t in range(len(mask) * 8) if mask[t >> 3] >> (t & 7) & 1]
        token = END if END in allowed else rng.choice(allowed)
        if token == END:
            break
        token_ids.append(token)
        assert matcher.consume_token(token)
    return tokenizer.decode(token_ids)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("is_whole", [True, False])
def test_what_a_grammar_allows_is_read_and_valid(
    name: str, is_whole: bool, tokenizer: Tokenizer, grammars: Grammars
) -> None:
    family = markup(name)
    source = call_grammar(family, TOOLS, is_whole=is_whole, repeats=True)
    assert source is not None
    names = set()
    for seed in range(4):
        text = written(tokenizer, grammars, source, seed)
        parser = TurnParser(family, AssistantTurn(tools=TOOLS))
        events = [*parser.push(text if is_whole else f"<tool_call>{text}"), *parser.finish()]
        calls = join_calls([event for event in events if isinstance(event, ToolCallDelta)])
        assert len(events) == len([e for e in events if isinstance(e, ToolCallDelta)]), text
        assert calls, text
        names |= {call.name for call in calls}
        for call in calls:
            schema = LOOK if call.name == "look" else {"const": {}}
            jsonschema.validate(json.loads(call.arguments), schema)
    assert names == {"look", "rest"}


def test_a_text_of_qwen_coder_is_anything_up_to_its_end(
    tokenizer: Tokenizer, grammars: Grammars
) -> None:
    parameters = {"type": "object", "properties": {"code": {"type": "string"}}}
    tools = [{"type": "function", "function": {"name": "run", "parameters": parameters}}]
    source = call_grammar(markup("qwen3_coder"), tools, is_whole=False, repeats=False)
    assert source is not None
    matcher = asyncio.run(grammars.compile(Structure(StructureKind.GRAMMAR, source, "tools")))
    text = (
        "\n<function=run>\n<parameter=code>\nif a < b:\n    print('</param>')\n</parameter>\n"
        "</function>\n</tool_call>"
    )
    token_ids = tokenizer.encode(text)
    assert matcher.try_consume_tokens(token_ids) == len(token_ids)
    assert matcher.is_stopped()


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
def test_texts_within_a_family_of_arguments_are_read_as_they_were_allowed(
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
    tools = [{"type": "function", "function": {"name": "run", "parameters": schema}}]
    source = call_grammar(family, tools, is_whole=False, repeats=False)
    assert source is not None
    matcher = asyncio.run(grammars.compile(Structure(StructureKind.GRAMMAR, source, "tools")))
    token_ids = tokenizer.encode(text)
    assert matcher.try_consume_tokens(token_ids) == len(token_ids)
    parser = TurnParser(family, AssistantTurn(tools=tools))
    events = [*parser.push(f"<tool_call>{text}"), *parser.finish()]
    (call,) = join_calls([event for event in events if isinstance(event, ToolCallDelta)])
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
def test_what_would_be_read_as_something_else_is_not_allowed(
    name: str, schema: dict[str, Any], text: str, tokenizer: Tokenizer, grammars: Grammars
) -> None:
    tools = [{"type": "function", "function": {"name": "run", "parameters": schema}}]
    source = call_grammar(markup(name), tools, is_whole=False, repeats=False)
    assert source is not None
    matcher = asyncio.run(grammars.compile(Structure(StructureKind.GRAMMAR, source, "tools")))
    token_ids = tokenizer.encode(text)
    assert matcher.try_consume_tokens(token_ids) < len(token_ids)


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
def test_what_a_family_cannot_write_is_left_out_unless_it_is_required(
    name: str, parameter: dict[str, Any]
) -> None:
    schema: dict[str, Any] = {"type": "object", "properties": {"a": parameter, "b": {}}}
    tools = [{"type": "function", "function": {"name": "run", "parameters": schema}}]
    source = call_grammar(markup(name), tools, is_whole=False, repeats=False)
    assert source is not None
    assert re.search(r"\bb\b", source)
    assert not re.search(r'a:|"a', source)
    schema["required"] = ["a"]
    assert call_grammar(markup(name), tools, is_whole=False, repeats=False) is None


@pytest.mark.parametrize("name", ["function_gemma", "minicpm5", "muse_spark"])
def test_a_name_that_a_family_cannot_write_is_refused(name: str) -> None:
    schema = {"type": "object", "properties": {'a"<': {"type": "string"}}}
    tools = [{"type": "function", "function": {"name": "run", "parameters": schema}}]
    with pytest.raises(ValueError, match="cannot be written in"):
        call_grammar(markup(name), tools, is_whole=True, repeats=True)


def test_a_name_that_python_does_not_know_is_refused() -> None:
    tools = [{"type": "function", "function": {"name": "look-up", "parameters": LOOK}}]
    with pytest.raises(ValueError, match="not a Python identifier"):
        call_grammar(markup("pythonic"), tools, is_whole=True, repeats=True)


def test_formats_that_are_not_known_have_no_grammar() -> None:
    unknown = Markup(call_format="of_next_year", call_start=(START,))
    assert call_grammar(unknown, TOOLS, is_whole=True, repeats=True) is None
    several = Markup(call_format="json_tools", call_start=(1, 2))
    assert call_grammar(several, TOOLS, is_whole=True, repeats=True) is None


# ---- what is planned


@pytest.fixture(scope="module")
def planner(tokenizer: Tokenizer) -> Iterator[Planner]:
    found = Planner(tokenizer, tokenizer.vocab_size)
    yield found
    found.close()


def plan(planner: Planner, turn: AssistantTurn | None, structure: Structure | None = None) -> Any:
    return asyncio.run(planner.guide([5, 6], SamplingParams(structure=structure), turn))


def test_most_answers_have_no_guide(planner: Planner) -> None:
    assert plan(planner, None) is None
    assert plan(planner, AssistantTurn()) is None
    assert plan(planner, AssistantTurn(tools=TOOLS, tool_choice=ToolChoice.NONE)) is None


def test_a_free_choice_of_tools_delays_no_token_until_a_call_begins(planner: Planner) -> None:
    guide = plan(planner, AssistantTurn(tools=TOOLS))
    assert guide.mask() is None
    assert not guide.must_wait
    guide.read([START])
    assert guide.must_wait


def test_a_tool_whose_schema_cannot_be_followed_is_free_unless_it_is_required(
    planner: Planner,
) -> None:
    parameters = {"type": "object", "properties": {"a": {"type": "no such type"}}}
    tools = [{"type": "function", "function": {"name": "odd", "parameters": parameters}}]
    assert plan(planner, AssistantTurn(tools=tools)) is None
    with pytest.raises(InvalidParameter, match="tools: cannot be followed"):
        plan(planner, AssistantTurn(tools=tools, tool_choice=ToolChoice.REQUIRED))
    many = {"properties": {str(number): {} for number in range(501)}}
    tools = [{"type": "function", "function": {"name": "big", "parameters": many}}]
    assert plan(planner, AssistantTurn(tools=tools)) is None
    with pytest.raises(InvalidParameter, match="tools: the parameters of 'big': it has more than"):
        plan(planner, AssistantTurn(tools=tools, tool_choice=ToolChoice.REQUIRED))


def test_a_structure_beside_tools_is_one_or_the_other(planner: Planner) -> None:
    schema = Structure(StructureKind.JSON_SCHEMA, '{"const": {"a": 1}}', "response_format")
    guide = plan(planner, AssistantTurn(tools=TOOLS), schema)
    mask = guide.mask()
    allowed = {t for t in range(len(mask) * 8) if mask[t >> 3] >> (t & 7) & 1}
    assert START in allowed
    assert 2 <= len(allowed) < 10
    with pytest.raises(InvalidParameter, match="cannot be combined with tools"):
        plan(planner, AssistantTurn(tools=TOOLS), Structure(StructureKind.GRAMMAR, 'start: "a"'))
    assert plan(planner, AssistantTurn(tools=TOOLS), Structure(StructureKind.REGEX, "[a-c]")).mask()
    with pytest.raises(InvalidParameter, match="cannot be combined with a required"):
        plan(planner, AssistantTurn(tools=TOOLS, tool_choice=ToolChoice.REQUIRED), schema)


# ---- markers of several tokens, in a tokenizer that has what is special in a family

SPECIAL = {
    "function_gemma": ["<start_function_call>", "<end_function_call>", "<escape>"],
    "kimi_k3": ["<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"],
    "minicpm5": [],
    "muse_spark": [],
}
TEMPLATES = {
    "function_gemma": "<start_function_call>{{ tools }}",
    "kimi_k3": "{{ tools }}",
    "minicpm5": '<function name="<param name="{{ tools }}',
    "muse_spark": "<atem:function_calls>{{ tools }}",
}


@pytest.mark.parametrize("name", SPECIAL)
@pytest.mark.parametrize("is_required", [True, False])
def test_a_familys_own_markers_begin_what_follows_its_schemas(
    name: str, is_required: bool, tokenizer_with: Callable[[list[str], str], Tokenizer]
) -> None:
    tokenizer = tokenizer_with(SPECIAL[name], TEMPLATES[name])
    markup = tokenizer.markup
    assert markup.call_format == name
    planner = Planner(tokenizer, tokenizer.vocab_size)
    turn = AssistantTurn(
        tools=TOOLS, tool_choice=ToolChoice.REQUIRED if is_required else ToolChoice.AUTO
    )
    for seed in range(2):
        guide = plan(planner, turn)
        rng, parser = Random(seed), TurnParser(markup, turn)
        decoder = tokenizer.stream(parser.tokens)
        begun = [] if is_required else tokenizer.encode("Well. ") + list(markup.call_start)
        if markup.call_tail and begun:
            # More stands in the token that ends the marker, in this vocabulary or in another.
            begun.pop()
            assert guide.mask() is None
            guide.read(begun)
            assert guide.must_wait
            assert guide.mask() is None  # it may be a text yet
            begun_call = tokenizer.encode(markup.call_tail)
            guide.read(begun_call)
            begun += begun_call
        else:
            guide.read(begun)
        assert guide.mask() is not None
        events: list[Any] = [*parser.push(decoder.push(begun))]
        for token in drawn(guide, rng, 2_000, may_be_free=True):
            events += parser.push(decoder.push([token]))
        events += [*parser.push(decoder.finish()), *parser.finish()]
        assert guide.error is None
        text = "".join(event.text for event in events if isinstance(event, TextDelta)).strip()
        assert text == ("" if is_required else "Well.")
        calls = join_calls([event for event in events if isinstance(event, ToolCallDelta)])
        assert calls
        for call in calls:
            schema = LOOK if call.name == "look" else {"const": {}}
            jsonschema.validate(json.loads(call.arguments), schema)
    planner.close()


def test_a_text_that_only_looks_like_a_marker_stays_one(
    tokenizer_with: Callable[[list[str], str], Tokenizer],
) -> None:
    tokenizer = tokenizer_with([], TEMPLATES["minicpm5"])
    planner = Planner(tokenizer, tokenizer.vocab_size)
    guide = plan(planner, AssistantTurn(tools=TOOLS))
    for text in ("<function name", "s are short, <function name", "</", "<function name"):
        guide.read(tokenizer.encode(text))
        assert guide.mask() is None
    assert guide.error is None
    planner.close()


# ---- harmony, whose parts all begin with the same token

HARMONY = ["<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>"]


def test_a_required_call_of_llama_is_the_whole_answer(
    tokenizer: Tokenizer, grammars: Grammars
) -> None:
    llama = Markup(call_format="llama3", is_bare=True)
    assert call_grammar(llama, TOOLS, is_whole=False, repeats=True) is None
    source = call_grammar(llama, TOOLS, is_whole=True, repeats=True)
    assert source is not None
    text = written(tokenizer, grammars, source, 1)
    parser = TurnParser(llama, AssistantTurn(tools=TOOLS))
    events = [*parser.push(text), *parser.finish()]
    [call] = join_calls([event for event in events if isinstance(event, ToolCallDelta)])
    assert call.name in ("look", "rest")
    assert isinstance(json.loads(call.arguments), dict)


@pytest.mark.parametrize("is_required", [True, False])
def test_harmony_thinks_and_then_follows(
    is_required: bool, tokenizer_with: Callable[[list[str], str], Tokenizer]
) -> None:
    tokenizer = tokenizer_with(HARMONY, "{{ tools }}")
    planner = Planner(tokenizer, tokenizer.vocab_size)
    choice = ToolChoice.REQUIRED if is_required else ToolChoice.AUTO
    turn = AssistantTurn(tools=TOOLS if is_required else (), tool_choice=choice, thinking_budget=3)
    structure = None if is_required else Structure(StructureKind.CHOICE, '["yes", "no"]')
    for seed in range(6):
        guide = plan(planner, turn, structure)
        rng, parser = Random(seed), TurnParser(tokenizer.markup, turn)
        decoder = tokenizer.stream(parser.tokens)
        begun = tokenizer.markup.think_start if seed % 2 else ()
        guide.read(begun)
        events: list[Any] = [*parser.push(decoder.push(begun))]
        for token in drawn(guide, rng, 400):
            events += parser.push(decoder.push([token]))
        events += [*parser.push(decoder.finish()), *parser.finish()]
        assert guide.error is None
        assert not begun or any(isinstance(event, ReasoningDelta) for event in events)
        calls = join_calls([event for event in events if isinstance(event, ToolCallDelta)])
        text = "".join(event.text for event in events if isinstance(event, TextDelta))
        if is_required:
            assert [call.name for call in calls] in (["look"], ["rest"])
            assert text == ""
        else:
            assert text in ("yes", "no")
    planner.close()

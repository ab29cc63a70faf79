"""A text is parsed the same way however it is cut into pieces."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.tool_parsers import (
    function_gemma,
    gemma4,
    glm47,
    json_tools,
    kimi_k2,
    kimi_k3,
    minicpm5,
    minimax_m2,
    mistral,
    muse_spark,
    pythonic,
    qwen3_coder,
)

from mlxserve.text.parsing.markup import Markup, Part
from mlxserve.text.parsing.parser import TurnParser
from mlxserve.text.parsing.readers import ReasoningDelta, TextDelta
from mlxserve.text.parsing.turn import AssistantTurn, ToolCallDelta, ToolChoice, join_calls

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "parameters": {
                "type": "object",
                "properties": {"at": {"type": "string"}, "n": {"type": "integer"}},
            },
        },
    }
]
TURN = AssistantTurn(tools=TOOLS)


def markup(name: str, module: Any) -> Markup:
    """The markup of a model that thinks and uses one of mlx-lm's call parsers."""
    think = (("<think>", Part.THINKING), ("</think>", Part.TEXT))
    call = (module.tool_call_start, Part.CALL)
    return Markup(
        edges={Part.TEXT: (*think, call), Part.THINKING: (think[1], call)},
        call_format=name,
        call_end=module.tool_call_end,
        parse_call=module.parse_tool_call,
    )


JSON = markup("json_tools", json_tools)


@dataclass
class ParsedAnswer:
    text: str
    reasoning: str
    calls: list[tuple[str, Any]]
    num_deltas: int  # pieces of calls


def parse(
    text: str,
    markup: Markup = JSON,
    turn: AssistantTurn = TURN,
    *,
    pieces: Sequence[str] | None = None,
    is_thinking: bool = False,
) -> ParsedAnswer:
    parser = TurnParser(markup, turn, is_thinking=is_thinking)
    events = [event for piece in pieces or [text] for event in parser.push(piece)]
    events += parser.finish()
    deltas = [event for event in events if isinstance(event, ToolCallDelta)]
    assert [d.index for d in deltas] == sorted(d.index for d in deltas)
    calls = join_calls(deltas)
    assert len({call.id for call in calls}) == len(calls)
    return ParsedAnswer(
        "".join(event.text for event in events if isinstance(event, TextDelta)),
        "".join(event.text for event in events if isinstance(event, ReasoningDelta)),
        [(call.name, _json(call.arguments)) for call in calls],
        len(deltas),
    )


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def cut(text: str, places: Sequence[int]) -> list[str]:
    bounds = sorted({0, len(text), *(place % (len(text) + 1) for place in places)})
    return [text[a:b] for a, b in pairwise(bounds)] or [""]


def test_an_answer_is_split_into_thinking_text_and_calls() -> None:
    found = parse(
        "<think>\nHm.\n</think>\n\nI look.\n"
        '<tool_call>\n{"name": "look", "arguments": {"at": "a }\\" <b>"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>\n'
    )
    assert found.reasoning == "Hm."
    assert found.text == "I look."
    assert found.calls == [("look", {"at": 'a }" <b>'}), ("look", {})]


CALLS = {
    "json_tools": (
        json_tools,
        '<tool_call>{"name": "look", "arguments": {"at": "ü", "n": 2}}</tool_call>',
    ),
    "qwen3_coder": (
        qwen3_coder,
        "<tool_call>\n<function=look>\n<parameter=at>\nü\n</parameter>\n<parameter=n>\n2\n"
        "</parameter>\n</function>\n</tool_call>",
    ),
    "glm47": (
        glm47,
        "<tool_call>look<arg_key>at</arg_key><arg_value>ü</arg_value><arg_key>n</arg_key>"
        "<arg_value>2</arg_value></tool_call>",
    ),
    "gemma4": (gemma4, '<|tool_call>call:look{at:<|"|>ü<|"|>,n:2}<tool_call|>'),
    "minimax_m2": (
        minimax_m2,
        '<minimax:tool_call>\n<invoke name="look">\n<parameter name="at">ü</parameter>\n'
        '<parameter name="n">2</parameter>\n</invoke>\n</minimax:tool_call>',
    ),
    "pythonic": (pythonic, '<|tool_call_start|>[look(at="ü", n=2)]<|tool_call_end|>'),
    "kimi_k2": (
        kimi_k2,
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.look:0"
        '<|tool_call_argument_begin|> {"at": "ü", "n": 2}<|tool_call_end|>'
        "<|tool_calls_section_end|>",
    ),
    "function_gemma": (
        function_gemma,
        "<start_function_call>call:look{at:<escape>ü<escape>,n:2}<end_function_call>",
    ),
    "kimi_k3": (
        kimi_k3,
        '<|open|>tools<|sep|><|open|>call tool="look" index="1"<|sep|><|open|>argument key="at" '
        'type="string"<|sep|>ü<|close|>argument<|sep|><|open|>argument key="n" type="integer"<|sep|>'
        "2<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|>",
    ),
    "minicpm5": (
        minicpm5,
        '<function name="look"><param name="at">ü</param><param name="n">2</param></function>',
    ),
    "muse_spark": (
        muse_spark,
        '<atem:function_calls><atem:invoke name="look"><atem:parameter name="at">ü'
        '</atem:parameter><atem:parameter name="n">2</atem:parameter></atem:invoke>'
        "</atem:function_calls>",
    ),
    "mistral": (mistral, '[TOOL_CALLS]look[ARGS]{"at": "ü", "n": 2}'),
    "mistral list": (mistral, '[TOOL_CALLS] [{"name": "look", "arguments": {"at": "ü", "n": 2}}]'),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_calls_of_every_model_family_are_parsed(name: str, size: int) -> None:
    module, text = CALLS[name]
    text = f"Yes. {text}"
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    found = parse(text, markup(name.split()[0], module), pieces=pieces)
    assert found.text == "Yes."
    assert found.calls == [("look", {"at": "ü", "n": 2})]


@pytest.mark.parametrize("name", ["json_tools", "kimi_k2", "mistral"])
def test_json_arguments_stream_while_they_are_generated(name: str) -> None:
    module, text = CALLS[name]
    found = parse(text, markup(name, module), pieces=list(text))
    assert found.num_deltas > 10


MARKERS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]"]
FRAGMENTS = st.lists(
    st.sampled_from(
        [
            *MARKERS,
            '{"name": "look", "arguments": {"at": "x"}}',
            '{"name": "look", "arguments": ',
            '{"arguments": {"n": [1, {}]}, "name": "look"}',
            '"<tool_call>',
            '"at": "\\"',
            "{",
            "}",
            "\n",
            " ",
            "<",
            "look",
            "null",
            "ü🙂",
            "<function=look>\n<parameter=at>\nx\n</parameter>\n</function>",
        ]
    ),
    max_size=12,
).map("".join)


@settings(max_examples=150, derandomize=True, database=None, deadline=None)
@given(
    text=FRAGMENTS,
    places=st.lists(st.integers(0, 400), max_size=12),
    name=st.sampled_from(["json_tools", "qwen3_coder", "mistral", "kimi_k2"]),
    is_parallel=st.booleans(),
)
def test_any_split_of_any_markup_gives_the_same_message(
    text: str, places: list[int], name: str, is_parallel: bool
) -> None:
    family = markup(name, CALLS[name][0])
    turn = AssistantTurn(tools=TOOLS, parallel_tool_calls=is_parallel)
    whole, split = parse(text, family, turn), parse(text, family, turn, pieces=cut(text, places))
    assert (whole.text, whole.reasoning, whole.calls) == (split.text, split.reasoning, split.calls)


@given(text=st.text(max_size=60), places=st.lists(st.integers(0, 60), max_size=6))
@settings(max_examples=60, derandomize=True, database=None, deadline=None)
def test_text_without_markup_is_unchanged(text: str, places: list[int]) -> None:
    assert parse(text, pieces=cut(text, places)).text == text


def test_without_tools_a_call_is_text_but_thinking_is_still_separated() -> None:
    text = "<think>a</think><tool_call>b</tool_call>"
    for turn in (AssistantTurn(), AssistantTurn(tools=TOOLS, tool_choice=ToolChoice.NONE)):
        found = parse(text, turn=turn)
        assert (found.reasoning, found.text, found.calls) == ("a", "<tool_call>b</tool_call>", [])


def test_thinking_opened_by_the_prompt_is_recognised() -> None:
    found = parse("Hm.\n</think>\nYes.", is_thinking=True)
    assert (found.reasoning, found.text) == ("Hm.", "Yes.")


def test_without_parallel_calls_the_first_call_ends_the_turn() -> None:
    text = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'
    parser = TurnParser(JSON, AssistantTurn(tools=TOOLS, parallel_tool_calls=False))
    events = list(parser.push(text * 2 + "and more"))
    assert parser.is_over
    assert len(join_calls([e for e in events if isinstance(e, ToolCallDelta)])) == 1
    assert not [e for e in events if isinstance(e, TextDelta)]
    assert not list(parser.finish())


@pytest.mark.parametrize(
    ("text", "calls", "rest"),
    [
        ("<tool_call>\nlook around\n</tool_call> ok", [], "\nlook around\n ok"),
        ('<tool_call>{"name": "look"}</tool_call>', [("look", {})], ""),
        (
            '<tool_call>{"name": "look", "arguments": {"n": 1}\n</tool_call>',
            [("look", {"n": 1})],
            "",
        ),
        (
            '<tool_call>{"name": "look", "arguments": {"n": 1</tool_call>.',
            [("look", '{"n": 1')],
            ".",
        ),
        ('<tool_call>{"name": "look", "arguments": {"n": 1', [("look", '{"n": 1')], ""),
        ('<tool_call>{"name": 3, "arguments": {}}</tool_call>', [], '{"name": 3, "arguments": {}}'),
        ('<tool_call>{"name": "look", "argu', [("look", "")], ""),
        ('<tool_call>{"nam', [], '{"nam'),
        ('<tool_call>{"name": "look", "arguments": "{\\"n\\": 1}"}', [("look", {"n": 1})], ""),
        (
            '<tool_call>{"name": "look", "arguments": {"at": "a\nb"}}',
            [("look", {"at": "a\nb"})],
            "",
        ),
        ("<tool_call>", [], ""),
    ],
)
def test_malformed_calls_become_text_or_incomplete_calls(
    text: str, calls: list[tuple[str, Any]], rest: str
) -> None:
    found = parse(text)
    assert (found.calls, found.text) == (calls, rest)


@pytest.mark.parametrize("name", ["json_tools", "qwen3_coder"])
def test_a_long_call_in_small_pieces_is_parsed(name: str) -> None:
    at = "</tool" * 10_000
    body = {
        "json_tools": json.dumps({"name": "look", "arguments": {"at": at}}),
        "qwen3_coder": f"<function=look>\n<parameter=at>\n{at}\n</parameter>\n</function>",
    }[name]
    text = f"<tool_call>{body}</tool_call>."
    pieces = [text[n : n + 5] for n in range(0, len(text), 5)]
    found = parse(text, markup(name, CALLS[name][0]), pieces=pieces)
    assert found.calls == [("look", {"at": at})]
    assert found.text == "."


LLAMA = Markup(
    edges={Part.TEXT: (("<|python_tag|>", Part.CALL),)}, call_format="llama3", is_bare=True
)
CALLED = [("look", {"n": 1})]


@pytest.mark.parametrize("size", [1, 1000])
@pytest.mark.parametrize(
    ("text", "said", "calls"),
    [
        ('{"name": "look", "parameters": {"n": 1}}', "", CALLED),
        ('\n\n{"type": "function", "name": "look", "parameters": {"n": 1}}', "", CALLED),
        ('<|python_tag|>{"name": "look", "parameters": {"n": 1}}', "", CALLED),
        ('{"name": "Ann", "age": 3} is JSON', '{"name": "Ann", "age": 3} is JSON', []),
        ("{x} and {y}", "{x} and {y}", []),
        ('{"na', '{"na', []),
        (" Hello {you}", " Hello {you}", []),
        ("", "", []),
    ],
)
def test_a_bare_json_object_is_a_call_only_if_it_names_a_tool(
    text: str, said: str, calls: list[tuple[str, Any]], size: int
) -> None:
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    found = parse(text, LLAMA, pieces=pieces)
    assert (found.text, found.calls) == (said, calls)


HARMONY = Markup(
    edges={
        Part.HEADER: (
            ("<|channel|>analysis<|message|>", Part.THINKING),
            ("<|channel|>final<|message|>", Part.TEXT),
            ("to=functions.", Part.CALL),
        ),
        Part.THINKING: (("<|end|>", Part.HEADER),),
        Part.TEXT: (("<|end|>", Part.HEADER),),
    },
    first=Part.HEADER,
    call_format="harmony",
    call_end="<|call|>",
)


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_harmony_channels_are_separated(size: int) -> None:
    text = (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes."
        "<|end|><|start|>assistant<|channel|>commentary to=functions.look <|constrain|>json"
        '<|message|>{"n": 1}'
    )
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    found = parse(text, HARMONY, pieces=pieces)
    assert (found.reasoning, found.text, found.calls) == ("Hm.", "Yes.", [("look", {"n": 1})])

"""A text is parsed the same way however it is cut into pieces."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxserve.text.parsing.parser import TurnParser
from mlxserve.text.parsing.turn import (
    AssistantTurn,
    TextDelta,
    ToolCallDelta,
    ToolChoice,
    join_calls,
)
from tests.text.parsing.answers import JSON, TOOLS, cut, markup, parse


def test_an_answer_is_split_into_thinking_text_and_calls() -> None:
    found = parse(
        "<think>\nHm.\n</think>\n\nI look.\n"
        '<tool_call>\n{"name": "look", "arguments": {"at": "a }\\" <b>"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>\n'
    )
    assert found.reasoning == "Hm."
    assert found.text == "I look."
    assert found.calls == [("look", {"at": 'a }" <b>'}), ("look", {})]


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
            "[look(at='it's')]",
            'call:look{at:<|"|>x<|"|>}',
            "<arg_key>at</arg_key><arg_value>x</arg_value>",
        ]
    ),
    max_size=12,
).map("".join)


@settings(max_examples=150, derandomize=True, database=None, deadline=None)
@given(
    text=FRAGMENTS,
    places=st.lists(st.integers(0, 400), max_size=12),
    name=st.sampled_from(
        ["json_tools", "qwen3_coder", "mistral", "kimi_k2", "glm47", "llama3", "pythonic", "gemma4"]
    ),
    is_parallel=st.booleans(),
)
def test_any_split_of_any_markup_gives_the_same_message(
    text: str, places: list[int], name: str, is_parallel: bool
) -> None:
    family = markup(name)
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


def test_malformed_calls_become_text_or_incomplete_calls() -> None:
    for text, calls, rest in [
        (
            "<tool_call>\nlook around\n</tool_call> ok",
            [],
            "<tool_call>\nlook around\n</tool_call> ok",
        ),
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
        (
            '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
            [],
            '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
        ),
        ('<tool_call>{"name": "look", "argu', [], '<tool_call>{"name": "look", "argu'),
        ('<tool_call>{"nam', [], '<tool_call>{"nam'),
        ('<tool_call>{"name": "look", "arguments": "{\\"n\\": 1}"}', [("look", {"n": 1})], ""),
        (
            '<tool_call>{"name": "look", "arguments": {"at": "a\nb"}}',
            [("look", {"at": "a\nb"})],
            "",
        ),
        ("<tool_call>", [], "<tool_call>"),
    ]:
        found = parse(text)
        assert (found.calls, found.text) == (calls, rest), text


@pytest.mark.parametrize("name", ["json_tools", "qwen3_coder"])
def test_a_long_call_in_small_pieces_is_parsed(name: str) -> None:
    at = "</tool" * 10_000
    body = {
        "json_tools": json.dumps({"name": "look", "arguments": {"at": at}}),
        "qwen3_coder": f"<function=look>\n<parameter=at>\n{at}\n</parameter>\n</function>",
    }[name]
    text = f"<tool_call>{body}</tool_call>."
    pieces = [text[n : n + 5] for n in range(0, len(text), 5)]
    found = parse(text, markup(name), pieces=pieces)
    assert found.calls == [("look", {"at": at})]
    assert found.text == "."


CALLED = [("look", {"n": 1})]


def test_a_bare_json_object_is_a_call_only_if_it_names_a_tool() -> None:
    for size in [1, 1000]:
        for text, said, calls in [
            ('{"name": "look", "parameters": {"n": 1}}', "", CALLED),
            ('\n\n{"type": "function", "name": "look", "parameters": {"n": 1}}', "", CALLED),
            ('<|python_tag|>{"name": "look", "parameters": {"n": 1}}', "", CALLED),
            ('{"name": "Ann", "age": 3} is JSON', '{"name": "Ann", "age": 3} is JSON', []),
            ("{x} and {y}", "{x} and {y}", []),
            ('{"na', '{"na', []),
            (" Hello {you}", " Hello {you}", []),
            ("", "", []),
        ]:
            pieces = [text[at : at + size] for at in range(0, len(text), size)]
            found = parse(text, markup("llama3"), pieces=pieces)
            assert (found.text, found.calls) == (said, calls), (size, text)


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_harmony_channels_are_separated(size: int) -> None:
    text = (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes."
        "<|end|><|start|>assistant<|channel|>commentary to=functions.look <|constrain|>json"
        '<|message|>{"n": 1}'
    )
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    found = parse(text, markup("harmony"), pieces=pieces)
    assert (found.reasoning, found.text, found.calls) == ("Hm.", "Yes.", [("look", {"n": 1})])

"""Which answers get a guide, and what it makes them follow, for each family's own markers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from itertools import product
from random import Random
from typing import Any

import jsonschema
import pytest

from mlxserve.core.errors import InvalidParameter
from mlxserve.core.sampling_params import SamplingParams, Structure, StructureKind
from mlxserve.helpers.fair_executor import FairExecutor
from mlxserve.text.guidance.planner import Planner
from mlxserve.text.parsing.parser import TurnParser
from mlxserve.text.parsing.turn import AssistantTurn, ReasoningDelta, TextDelta, ToolChoice
from mlxserve.text.tokenizer import Tokenizer
from tests.text.guidance.call_formats import (
    LOOK,
    START,
    TOOLS,
    allowed_tokens,
    calls_of,
    drawn,
    tool,
)


@pytest.fixture(scope="module")
def planner(tokenizer: Tokenizer) -> Iterator[Planner]:
    found = Planner(tokenizer, tokenizer.vocab_size, FairExecutor())
    yield found
    found.close()


def plan(planner: Planner, turn: AssistantTurn | None, structure: Structure | None = None) -> Any:
    return asyncio.run(planner.guide([5, 6], SamplingParams(structure=structure), turn))


def test_most_answers_have_no_guide(planner: Planner) -> None:
    assert plan(planner, None) is None
    assert plan(planner, AssistantTurn()) is None
    assert plan(planner, AssistantTurn(tools=TOOLS, tool_choice=ToolChoice.NONE)) is None


def test_optional_tools_delay_no_token_until_a_call_starts(planner: Planner) -> None:
    guide = plan(planner, AssistantTurn(tools=TOOLS))
    assert guide.mask() is None
    assert not guide.must_wait
    guide.read([START])
    assert guide.must_wait


def test_an_unsupported_tool_schema_is_ignored_unless_the_call_is_required(
    planner: Planner,
) -> None:
    parameters = {"type": "object", "properties": {"a": {"type": "no such type"}}}
    tools = [tool("odd", parameters)]
    assert plan(planner, AssistantTurn(tools=tools)) is None
    with pytest.raises(InvalidParameter, match="tools: cannot be followed"):
        plan(planner, AssistantTurn(tools=tools, tool_choice=ToolChoice.REQUIRED))
    many: dict[str, Any] = {"properties": {str(number): {} for number in range(501)}}
    tools = [tool("big", many)]
    assert plan(planner, AssistantTurn(tools=tools)) is None
    with pytest.raises(InvalidParameter, match="tools: the parameters of 'big': it has more than"):
        plan(planner, AssistantTurn(tools=tools, tool_choice=ToolChoice.REQUIRED))


def test_with_structure_and_tools_the_answer_follows_either(planner: Planner) -> None:
    schema = Structure(StructureKind.JSON_SCHEMA, '{"const": {"a": 1}}', "response_format")
    guide = plan(planner, AssistantTurn(tools=TOOLS), schema)
    allowed = allowed_tokens(guide.mask())
    assert START in allowed
    assert 2 <= len(allowed) < 10
    with pytest.raises(InvalidParameter, match="cannot be combined with tools"):
        plan(planner, AssistantTurn(tools=TOOLS), Structure(StructureKind.GRAMMAR, 'start: "a"'))
    assert plan(planner, AssistantTurn(tools=TOOLS), Structure(StructureKind.REGEX, "[a-c]")).mask()
    with pytest.raises(InvalidParameter, match="cannot be combined with a required"):
        plan(planner, AssistantTurn(tools=TOOLS, tool_choice=ToolChoice.REQUIRED), schema)


# ---- markers of several tokens, with a tokenizer that has the family's special tokens

SPECIAL = {
    "gemma4": ["<|tool_call>", "<tool_call|>", '<|"|>'],
    "kimi_k3": ["<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"],
    "minicpm5": [],
    "muse_spark": [],
}
TEMPLATES = {
    "gemma4": "<|tool_call><tool_call|>{{ tools }}",
    "kimi_k3": "{{ tools }}",
    "minicpm5": '<function name="<param name="{{ tools }}',
    "muse_spark": "<atem:function_calls>{{ tools }}",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SPECIAL)
def test_calls_follow_their_schemas_after_the_familys_own_marker(
    name: str, tokenizer_with: Callable[[list[str], str], Tokenizer]
) -> None:
    tokenizer = tokenizer_with(SPECIAL[name], TEMPLATES[name])
    markup = tokenizer.markup
    assert markup.format is not None
    assert markup.format.name == name
    planner = Planner(tokenizer, tokenizer.vocab_size, FairExecutor())
    for is_required, seed in product((True, False), range(2)):
        turn = AssistantTurn(
            tools=TOOLS, tool_choice=ToolChoice.REQUIRED if is_required else ToolChoice.AUTO
        )
        guide = plan(planner, turn)
        rng, parser = Random(seed), TurnParser(markup, turn)
        decoder = tokenizer.stream(parser.tokens)
        begun = [] if is_required else tokenizer.encode("Well. ") + list(markup.call_start)
        if markup.call_tail and begun:
            # The vocabulary may merge the marker's end with what follows it.
            begun.pop()
            assert guide.mask() is None
            guide.read(begun)
            assert guide.must_wait
            assert guide.mask() is None  # it may still be text
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
        calls = calls_of(events)
        assert calls
        for call in calls:
            schema = LOOK if call.name == "look" else {"const": {}}
            jsonschema.validate(json.loads(call.arguments), schema)
    planner.close()


def test_text_that_resembles_a_marker_stays_unconstrained(
    tokenizer_with: Callable[[list[str], str], Tokenizer],
) -> None:
    tokenizer = tokenizer_with([], TEMPLATES["minicpm5"])
    planner = Planner(tokenizer, tokenizer.vocab_size, FairExecutor())
    guide = plan(planner, AssistantTurn(tools=TOOLS))
    for text in ("<function name", "s are short, <function name", "</", "<function name"):
        guide.read(tokenizer.encode(text))
        assert guide.mask() is None
    assert guide.error is None
    planner.close()


# ---- harmony, whose parts all start with the same token

HARMONY = ["<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>"]


def test_harmony_may_think_before_its_constrained_answer(
    tokenizer_with: Callable[[list[str], str], Tokenizer],
) -> None:
    tokenizer = tokenizer_with(HARMONY, "{{ tools }}")
    planner = Planner(tokenizer, tokenizer.vocab_size, FairExecutor())
    for is_required, seed in product((True, False), range(6)):
        choice = ToolChoice.REQUIRED if is_required else ToolChoice.AUTO
        tools = TOOLS if is_required else ()
        turn = AssistantTurn(tools=tools, tool_choice=choice, thinking_budget=3)
        structure = None if is_required else Structure(StructureKind.CHOICE, '["yes", "no"]')
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
        calls = calls_of(events)
        text = "".join(event.text for event in events if isinstance(event, TextDelta))
        if is_required:
            assert [call.name for call in calls] in (["look"], ["rest"])
            assert text == ""
        else:
            assert text in ("yes", "no")
    planner.close()

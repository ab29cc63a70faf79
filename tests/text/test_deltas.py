"""An answer's deltas do not depend on how its tokens are grouped into steps."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxserve.core.sampling_params import SamplingParams
from mlxserve.hub.embedded import model_path
from mlxserve.request import FinishReason, Output
from mlxserve.text.deltas import DeltaDecoder
from mlxserve.text.parsing.parser import TurnParser
from mlxserve.text.parsing.turn import AssistantTurn, join_calls
from mlxserve.text.tokenizer import Tokenizer

TOOL = {"type": "function", "function": {"name": "look"}}
FRAGMENTS = st.lists(
    st.sampled_from(
        [
            "<think>",
            "</think>",
            '<tool_call>{"name": "look", "arguments": {"at": "STOP"}}</tool_call>',
            "<tool_call>",
            "STO",
            "P",
            "ü🙂",
            "\n",
            " a",
            "<",
        ]
    ),
    max_size=12,
).map("".join)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(model_path())


def decoded(tokenizer: Tokenizer, steps: Sequence[Sequence[int]]) -> tuple[Any, ...]:
    """(reasoning, text, calls, finish reason, stop string) of an answer in these steps."""
    parser = TurnParser(tokenizer.markup, AssistantTurn(tools=[TOOL]))
    decoder = DeltaDecoder(tokenizer, SamplingParams(stop=["STOP"]), frozenset({2}), parser)
    outputs = [Output("r", tuple(step), num_prompt=3) for step in steps]
    deltas = []
    for output in [*outputs, Output("r", (2,), FinishReason.STOP, num_prompt=3)]:
        deltas.append(decoder.push(output))
        if deltas[-1].finish_reason is not None:
            break
    calls = join_calls([piece for delta in deltas for piece in delta.tool_calls])
    return (
        "".join(delta.reasoning for delta in deltas),
        "".join(delta.text for delta in deltas),
        [(call.name, call.arguments) for call in calls],
        deltas[-1].finish_reason,
        deltas[-1].stop,
    )


@given(text=FRAGMENTS, cuts=st.lists(st.integers(0, 99), max_size=8))
@settings(max_examples=80, derandomize=True, database=None, deadline=None)
def test_the_message_does_not_depend_on_how_tokens_are_grouped_into_steps(
    text: str, cuts: list[int], tokenizer: Tokenizer
) -> None:
    ids = tokenizer.encode(text)
    bounds = sorted({0, len(ids), *(cut % (len(ids) + 1) for cut in cuts)})
    whole = decoded(tokenizer, [[token] for token in ids])
    assert decoded(tokenizer, [ids[a:b] for a, b in pairwise(bounds)]) == whole
    assert "STOP" not in whole[1]


def test_reasoning_tokens_are_counted(tokenizer: Tokenizer) -> None:
    thought = tokenizer.encode("a b c")
    ids = tokenizer.encode("<think>a b c</think>d")
    decoder = DeltaDecoder(
        tokenizer, SamplingParams(), frozenset(), TurnParser(tokenizer.markup, AssistantTurn())
    )
    usage = decoder.push(Output("r", tuple(ids), FinishReason.STOP, num_prompt=3)).usage
    assert usage is not None
    assert usage.reasoning_tokens == len(thought) + 1  # including the end marker
    assert usage.completion_tokens == len(ids)


@pytest.mark.parametrize("group", [1, 2, 100])
def test_a_stop_string_before_the_minimum_of_tokens_is_text(
    tokenizer: Tokenizer, group: int
) -> None:
    token_ids = tokenizer.encode("a STOP b STOP c")
    first = next(n for n in range(99) if "STOP" in tokenizer.decode(token_ids[:n]))
    params = SamplingParams(stop=["STOP"], min_tokens=first)
    decoder = DeltaDecoder(tokenizer, params, frozenset())
    text = ""
    for at in range(0, len(token_ids), group):
        delta = decoder.push(Output("r", tuple(token_ids[at : at + group]), num_prompt=3))
        text += delta.text
        if delta.finish_reason is not None:
            break
    assert (text, delta.finish_reason, delta.stop) == ("a STOP b ", FinishReason.STOP, "STOP")

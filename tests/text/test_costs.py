"""What work on texts is expected to take, and in which lane of the executor it so is."""

from __future__ import annotations

import json

from mlxserve.helpers.fair_executor import Lane, lane_of
from mlxserve.text.costs import encode_seconds, parse_seconds, render_seconds, text_size

TINY = {"role": "user", "content": "hi"}


def test_an_agents_prompt_is_short_work_and_a_book_is_not() -> None:
    prompt = [{"role": "user", "content": "x" * 3_000}] * 50
    assert lane_of(render_seconds(prompt)) is Lane.SHORT
    assert lane_of(encode_seconds(500_000)) is Lane.MEDIUM
    assert lane_of(encode_seconds(20_000_000)) is Lane.LONG


def test_thousands_of_tiny_messages_are_no_short_work() -> None:
    assert lane_of(render_seconds([TINY] * 6_000)) is Lane.MEDIUM
    assert lane_of(parse_seconds(json.dumps([TINY] * 10_000).encode())) is Lane.MEDIUM
    assert lane_of(parse_seconds(json.dumps([TINY] * 100).encode())) is Lane.SHORT


def test_tools_count_beside_the_messages() -> None:
    tools = [{"function": {"name": "f", "description": "x" * 400_000}}]
    assert lane_of(render_seconds([TINY])) is Lane.SHORT
    assert lane_of(render_seconds([TINY], tools)) is Lane.MEDIUM


def test_the_size_of_a_text_counts_nested_texts() -> None:
    tools = [{"function": {"name": "f", "parameters": {"enum": ["ab", "cd"], "minimum": 1.5}}}]
    assert text_size(tools, None, "xyz", ("q",)) == len("f" + "ab" + "cd" + "xyz" + "q")


def test_deeply_nested_values_are_measured() -> None:
    value: object = "x"
    for _ in range(100_000):
        value = [value]
    assert text_size(value) == 1

"""Large texts wait for each other; small ones pass them."""

from __future__ import annotations

import asyncio
import threading

from mlxserve.text.lanes import LARGE, run_in_lane, text_size


def test_small_texts_pass_any_number_of_large_ones() -> None:
    may_end = threading.Event()

    async def scenario() -> None:
        large = [
            asyncio.ensure_future(run_in_lane(LARGE + 1, lambda: may_end.wait(30)))
            for _ in range(64)
        ]
        assert await run_in_lane(LARGE, lambda: "small") == "small"
        assert not any(each.done() for each in large)
        may_end.set()
        assert all(await asyncio.gather(*large))

    asyncio.run(scenario())


def test_the_size_of_a_text_counts_nested_texts() -> None:
    tools = [{"function": {"name": "f", "parameters": {"enum": ["ab", "cd"], "minimum": 1.5}}}]
    assert text_size(tools, None, "xyz", ("q",)) == len("f" + "ab" + "cd" + "xyz" + "q")


def test_deeply_nested_values_are_measured() -> None:
    value: object = "x"
    for _ in range(100_000):
        value = [value]
    assert text_size(value) == 1

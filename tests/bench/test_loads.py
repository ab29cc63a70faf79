"""Each load sends what its headline is about."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest

from mlxserve.bench import loads
from mlxserve.bench.client import Exchange


class Client:
    """Answers at once with as many words as it may, and remembers how many were asked at once."""

    def __init__(self) -> None:
        self.exchanges: list[Exchange] = []
        self.prompts: list[list[str]] = []
        self.together: list[int] = []
        self._running = 0

    async def ask(
        self,
        prompt: str,
        max_tokens: int,
        *,
        label: str = "",
        on_text: Callable[[Exchange], None] = lambda _: None,
    ) -> Exchange:
        exchange = Exchange(label, 0.0)
        self.exchanges.append(exchange)
        self.prompts.append(prompt.split())
        self._running += 1
        self.together.append(self._running)
        for _ in range(max_tokens):
            exchange.times.append(1.0)
            on_text(exchange)
            await asyncio.sleep(0)
        self._running -= 1
        exchange.text = " ".join(["a"] * max_tokens)
        return exchange


def played(play: loads.Play, size: float = 1.0, **options: Any) -> Client:
    client = Client()
    stage = loads.Stage(client, random.Random(1), size)  # type: ignore[arg-type]
    asyncio.run(play(stage, **options))  # type: ignore[call-arg]
    return client


def common(prompts: list[list[str]]) -> int:
    """Words that all begin with."""
    return next(
        (at for at, words in enumerate(zip(*prompts, strict=False)) if len(set(words)) > 1),
        min(map(len, prompts)),
    )


@pytest.mark.parametrize("share", [0.1, 1 / 3.05, 0.9])
def test_prefix_shares_that_part_of_every_prompt(share: float) -> None:
    client = played(loads.prefix, share=share)
    assert {len(prompt) for prompt in client.prompts} == {400}
    assert common(client.prompts) == pytest.approx(share * 400, abs=1)
    assert client.together[0] == 1
    assert max(client.together) == 4


def test_admission_has_twelve_of_sixteen_pages_cached() -> None:
    client = played(loads.admission)
    assert [len(prompt) for prompt in client.prompts[1:]] == [16 * 32] * 12
    assert common(client.prompts[1:]) >= 12 * 32
    assert max(client.together) == 12


def test_chunked_sends_its_long_prompt_while_answers_run() -> None:
    client = played(loads.chunked)
    assert [len(prompt) for prompt in client.prompts] == [32] * 4 + [1000]
    assert client.together[-1] == 5


def test_each_turn_of_a_chat_goes_on_from_the_one_before() -> None:
    client = played(loads.chat, people=1, turns=3)
    first, second, third = client.prompts
    assert second[: len(first)] == first
    assert third[: len(second)] == second
    assert second[len(first) :][:16] == ["a"] * 16
    assert [exchange.label for exchange in client.exchanges] == ["turn 1", "turn 2", "turn 3"]


def test_agents_fan_out_from_one_template() -> None:
    client = played(loads.agents)
    assert len(client.prompts) == 5 + 3 * 2
    assert common(client.prompts) == 600


def test_siblings_come_at_once_and_begin_alike() -> None:
    client = played(loads.siblings)
    assert max(client.together) == 4
    assert common(client.prompts) == 600


def test_again_is_one_prompt_three_times() -> None:
    client = played(loads.again)
    assert client.prompts[0] == client.prompts[1] == client.prompts[2]


def test_preempt_asks_for_all_at_once_and_a_size_scales_it() -> None:
    assert max(played(loads.preempt).together) == 10
    assert {len(prompt) for prompt in played(loads.preempt, size=0.1).prompts} == {12}

"""Loads for a real server: who asks what, when. Each answers a headline of the system's sources.

A load gets a client and a generator of random words, sends its requests, and returns when the last
is answered. It knows no server's options: `serving.py` says which contenders it is run against.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mlxserve.bench.client import Exchange, LoadClient

Play = Callable[["Stage"], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Stage:
    """What a load plays on. `size` scales its prompts: 1 is what two CPU cores do in a minute."""

    client: LoadClient
    draw: random.Random
    size: float = 1.0

    def words(self, count: int) -> list[str]:
        """New words; one is one token of the synthetic models."""
        return [f"w{self.draw.randrange(1, 3000)}" for _ in range(count)]

    def scaled(self, count: int) -> int:
        return max(1, round(count * self.size))

    async def ask(self, words: Sequence[str], max_tokens: int, label: str = "") -> list[str]:
        """The prompt with its answer, as the start of a next prompt."""
        exchange = await self.client.ask(" ".join(words), max_tokens, label=label)
        return [*words, *exchange.text.split()]


async def prefix(stage: Stage, *, share: float = 1 / 3.05, count: int = 12) -> None:
    """Prompts of one length that begin alike, four at a time; the first one comes alone."""
    length = stage.scaled(400)
    shared = stage.words(round(length * share))
    prompts = [shared + stage.words(length - len(shared)) for _ in range(count)]
    await stage.ask(prompts[0], 8)
    await _at_most(4, [stage.ask(prompt, 8) for prompt in prompts[1:]])


async def admission(stage: Stage, *, count: int = 12) -> None:
    """Prompts of 16 pages with 12 of them cached, all at once."""
    page = 32
    shared = stage.words(12 * page)
    await stage.ask([*shared, "w1"], 1, label="warm-up")
    prompts = [shared + stage.words(4 * page) for _ in range(count)]
    await asyncio.gather(*(stage.ask(prompt, 8) for prompt in prompts))


async def chunked(stage: Stage) -> None:
    """Four answers run, and then a long prompt comes."""
    running: set[int] = set()
    all_run = asyncio.Event()

    def on_text(exchange: Exchange) -> None:
        if len(exchange.times) == 16:
            running.add(id(exchange))
        if len(running) == 4:
            all_run.set()

    prompts = [" ".join(stage.words(32)) for _ in range(4)]
    streams = asyncio.gather(
        *(stage.client.ask(prompt, 160, label="stream", on_text=on_text) for prompt in prompts)
    )
    either: list[asyncio.Future[Any]] = [streams, asyncio.create_task(all_run.wait())]
    # Streams that end without text have failed, which their exchanges tell.
    await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
    either[1].cancel()
    await stage.ask(stage.words(stage.scaled(1000)), 4, label="long prompt")
    await streams


async def preempt(stage: Stage, *, count: int = 10) -> None:
    """More answers at once than there is memory for."""
    prompts = [stage.words(stage.scaled(120)) for _ in range(count)]
    await asyncio.gather(*(stage.ask(prompt, stage.scaled(100)) for prompt in prompts))


async def chat(stage: Stage, *, people: int = 3, turns: int = 5) -> None:
    """People who talk on: each turn's prompt is all that was said before and some more."""

    async def talk(words: list[str]) -> None:
        for turn in range(1, turns + 1):
            words = await stage.ask(words, 16, label=f"turn {turn}")
            words = words + stage.words(stage.scaled(60))

    await asyncio.gather(*(talk(stage.words(stage.scaled(150))) for _ in range(people)))


async def agents(stage: Stage, *, calls: int = 5, fan_out: int = 3) -> None:
    """An agent reads on and on, then sends out others that begin where it began."""
    template = stage.words(stage.scaled(600))

    async def work(words: list[str], calls: int) -> None:
        for _ in range(calls):
            words = await stage.ask(words, 12)
            words = words + stage.words(stage.scaled(40))

    await work(template + stage.words(20), calls)
    await asyncio.gather(*(work(template + stage.words(20), 2) for _ in range(fan_out)))


async def siblings(stage: Stage, *, count: int = 4) -> None:
    """Cold prompts with one long beginning, all at once."""
    shared = stage.words(stage.scaled(600))
    prompts = [shared + stage.words(16) for _ in range(count)]
    await asyncio.gather(*(stage.ask(prompt, 4) for prompt in prompts))


async def again(stage: Stage) -> None:
    """One prompt, three times over."""
    words = stage.words(stage.scaled(600))
    for turn in ("cold", "again", "again"):
        await stage.ask(words, 4, label=turn)


async def _at_most(limit: int, asks: Sequence[Awaitable[object]]) -> None:
    gate = asyncio.Semaphore(limit)

    async def one(ask: Awaitable[object]) -> None:
        async with gate:
            await ask

    await asyncio.gather(*(one(ask) for ask in asks))

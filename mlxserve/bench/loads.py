"""Loads for a real server: which requests are sent when.

Each tests a headline claim of the systems that mlxserve learned from.

A load gets a client and a generator of random words, sends its requests, and returns when all are
answered. It knows no server options: `serving.py` chooses the contenders.
"""

from __future__ import annotations

import asyncio
import random
import statistics
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mlxserve.bench.client import LoadClient, TimedRequest
from mlxserve.bench.report import growth_exponent

Play = Callable[["LoadContext"], Awaitable[None]]
Ratios = Callable[
    [Sequence[TimedRequest]], dict[str, float]
]  # a load's own figures, from its answers


@dataclass(frozen=True, slots=True)
class LoadContext:
    """The client and parameters of a load.

    size: scales its prompts; 1 takes two CPU cores about a minute
    between: seconds between the starts of many answers at once. mlx-lm's server lets five
        connections wait to be accepted, and of 16 that are opened together two are reset.
    """

    client: LoadClient
    draw: random.Random
    size: float = 1.0
    between: float = 0.05

    def words(self, count: int) -> list[str]:
        """Draw new words; each is one token of the synthetic models."""
        return [f"w{self.draw.randrange(1, 3000)}" for _ in range(count)]

    def scaled(self, count: int) -> int:
        return scaled(count, self.size)

    async def ask(self, words: Sequence[str], max_tokens: int, label: str = "") -> list[str]:
        """Send a prompt; return its words and its answer's: the start of the next prompt."""
        request = await self.client.ask(" ".join(words), max_tokens, label=label)
        return [*words, *request.text.split()]

    async def ask_all(self, prompts: Sequence[Sequence[str]], max_tokens: int, label: str) -> None:
        """Send all prompts at once, `between` seconds apart."""

        async def ask(number: int, words: Sequence[str]) -> None:
            await asyncio.sleep(number * self.between)
            await self.ask(words, max_tokens, label)

        await asyncio.gather(*(ask(number, words) for number, words in enumerate(prompts)))


def scaled(count: int, size: float) -> int:
    return max(1, round(count * size))


async def prefix(context: LoadContext, *, share: float = 1 / 3.05, count: int = 12) -> None:
    """Prompts of one length with a shared prefix: the first one alone, then four at a time."""
    length = context.scaled(400)
    shared = context.words(round(length * share))
    prompts = [shared + context.words(length - len(shared)) for _ in range(count)]
    await context.ask(prompts[0], 8)
    await _at_most(4, [context.ask(prompt, 8) for prompt in prompts[1:]])


async def admission(context: LoadContext, *, count: int = 12) -> None:
    """Prompts of 16 pages, 12 of them cached, all at once."""
    page = 32
    shared = context.words(12 * page)
    await context.ask([*shared, "w1"], 1, label="warm-up")
    prompts = [shared + context.words(4 * page) for _ in range(count)]
    await asyncio.gather(*(context.ask(prompt, 8) for prompt in prompts))


async def chunked(context: LoadContext) -> None:
    """A long prompt arrives while four answers run."""
    running: set[int] = set()
    all_run = asyncio.Event()

    def on_text(request: TimedRequest) -> None:
        if len(request.times) == 16:
            running.add(id(request))
        if len(running) == 4:
            all_run.set()

    prompts = [" ".join(context.words(32)) for _ in range(4)]
    streams = asyncio.gather(
        *(context.client.ask(prompt, 160, label="stream", on_text=on_text) for prompt in prompts)
    )
    either: list[asyncio.Future[Any]] = [streams, asyncio.create_task(all_run.wait())]
    # Streams that end without text have failed; their requests hold the error.
    await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
    either[1].cancel()
    await context.ask(context.words(context.scaled(1000)), 4, label="long prompt")
    await streams


# Pieces of the running answer before other requests arrive.
_IDLE = 24
GAP, SHORT = "longest gap in idle steps", "short prompt's first token in idle steps"


async def beside(context: LoadContext) -> None:
    """Run one answer, then a short prompt, and when that is answered a long one."""
    pieces: dict[int, asyncio.Event] = {_IDLE: asyncio.Event()}

    def on_text(request: TimedRequest) -> None:
        if event := pieces.get(len(request.times)):
            event.set()

    prompt = " ".join(context.words(32))
    stream = asyncio.ensure_future(context.client.ask(prompt, 400, label="stream", on_text=on_text))
    idle = asyncio.create_task(pieces[_IDLE].wait())
    # A stream that ends without text has failed; its request holds the error.
    await asyncio.wait((stream, idle), return_when=asyncio.FIRST_COMPLETED)
    idle.cancel()
    await context.ask(context.words(8), 4, label="short prompt")
    await context.ask(context.words(context.scaled(2500)), 1, label="long prompt")
    await stream


def beside_ratios(requests: Sequence[TimedRequest]) -> dict[str, float]:
    """Gaps in units of the median gap while the answer ran alone; empty if that ended early."""
    first = {request.label: request for request in requests}
    gaps = first["stream"].gaps
    if len(gaps) < _IDLE:
        return {}
    idle = statistics.median(gaps[4 : _IDLE - 1])
    return {SHORT: first["short prompt"].ttft / idle, GAP: max(gaps[_IDLE - 1 :]) / idle}


async def preempt(context: LoadContext, *, count: int = 10) -> None:
    """Prompts that fit into memory together, and answers that do not."""
    prompts = [context.words(context.scaled(120)) for _ in range(count)]
    await asyncio.gather(*(context.ask(prompt, context.scaled(200)) for prompt in prompts))


async def chat(context: LoadContext, *, people: int = 3, turns: int = 5) -> None:
    """Conversations: each turn's prompt is the whole conversation so far and some new words."""

    async def talk(words: list[str]) -> None:
        for turn in range(1, turns + 1):
            words = await context.ask(words, 16, label=f"turn {turn}")
            words = words + context.words(context.scaled(60))

    await asyncio.gather(*(talk(context.words(context.scaled(150))) for _ in range(people)))


async def agents(context: LoadContext, *, calls: int = 5, fan_out: int = 3) -> None:
    """An agent whose context grows call by call, then a fan-out of agents with its template."""
    template = context.words(context.scaled(600))

    async def work(words: list[str], calls: int) -> None:
        for _ in range(calls):
            words = await context.ask(words, 12)
            words = words + context.words(context.scaled(40))

    await work(template + context.words(20), calls)
    await asyncio.gather(*(work(template + context.words(20), 2) for _ in range(fan_out)))


TOGETHER = "all together, in times of one alone"


async def siblings(context: LoadContext, *, count: int = 4) -> None:
    """A cold prompt alone, then several that share a long prefix, all at once."""
    length = context.scaled(600)
    await context.ask(context.words(length + 16), 4, label="alone")
    shared = context.words(length)
    prompts = [shared + context.words(16) for _ in range(count)]
    await asyncio.gather(*(context.ask(prompt, 4, label="together") for prompt in prompts))


def siblings_ratios(requests: Sequence[TimedRequest]) -> dict[str, float]:
    """Time from the first request to the last answer."""
    seconds = {}
    for label in ("alone", "together"):
        of_label = [request for request in requests if request.label == label]
        seconds[label] = max(e.ended for e in of_label) - min(e.started for e in of_label)
    return {TOGETHER: seconds["together"] / seconds["alone"]}


COMPUTED_AGAIN = "prompt tokens computed again"


async def again(context: LoadContext) -> None:
    """Send one prompt three times."""
    words = context.words(context.scaled(600))
    for turn in ("cold", "again", "again"):
        await context.ask(words, 4, label=turn)


def again_ratios(requests: Sequence[TimedRequest]) -> dict[str, float]:
    """Maximum over the repetitions."""
    repeated = [request for request in requests if request.label == "again"]
    return {COMPUTED_AGAIN: float(max(e.num_prompt - e.num_cached for e in repeated))}


LENGTHS = (300, 750, 1500, 3000)
GROWTH = "exponent of growth with the prompt's length"


async def lengths(context: LoadContext) -> None:
    """Cold prompts of growing length, one after the other."""
    for length in map(context.scaled, LENGTHS):
        await context.ask(context.words(length), 1, label=f"{length} tokens")


def lengths_ratios(requests: Sequence[TimedRequest]) -> dict[str, float]:
    """Exponent e with time to the first token ~ length ** e; empty for one length."""
    sizes = [request.num_prompt for request in requests]
    if len(set(sizes)) < 2:
        return {}
    return {GROWTH: growth_exponent(sizes, [request.ttft for request in requests])}


ONE, FOUR, SIXTEEN = "1 answer", "4 answers", "16 answers"
ON_PREFIX = "16 answers on one prefix"
_AT_ONCE = {ONE: 1, FOUR: 4, SIXTEEN: 16}


async def answers(context: LoadContext) -> None:
    """1, 4 and 16 different answers at once, then 16 whose prompts share a cached prefix."""
    tokens = context.scaled(64)
    for label, count in _AT_ONCE.items():
        prompts = [context.words(32) for _ in range(count)]
        await context.ask_all(prompts, tokens, label)
    shared = context.words(context.scaled(1536))
    await context.ask([*shared, "w1"], 1, label="prefix")
    prompts = [shared + context.words(32) for _ in range(16)]
    await context.ask_all(prompts, tokens, ON_PREFIX)


def answers_ratios(requests: Sequence[TimedRequest]) -> dict[str, float]:
    """Tokens per second once all answers have begun; empty if they are over by then."""
    ratios = {}
    for label in (*_AT_ONCE, ON_PREFIX):
        of_label = [request for request in requests if request.label == label]
        if (rate := _rate(of_label)) is not None:
            ratios[rate_name(label)] = rate
    return ratios


def rate_name(label: str) -> str:
    return f"tokens/s, {label}"


def _rate(requests: Sequence[TimedRequest]) -> float | None:
    """Tokens per second; each piece of text counts as its answer's average number of tokens."""
    if not requests or not all(request.times for request in requests):
        return None
    began = max(request.times[0] for request in requests)
    ended = max(request.ended for request in requests)
    tokens = 0.0
    for request in requests:
        pieces = sum(time > began for time in request.times)
        tokens += pieces * request.num_completion / len(request.times)
    return tokens / (ended - began) if tokens else None


_COPY, _NEW = "answer that copies", "answer that is new"


async def edit(context: LoadContext, *, changes: int = 3) -> None:
    """Ask for a text of 300 words repeated with some changes, then for one that repeats nothing.

    For a model that counts (`synthetic.py`): its answer to a prompt that ends in `w999` is `w1000
    ...`.
    """
    length = context.scaled(300)
    copied, new = _copied_and_new(context, length, changes)
    await context.ask(copied, length, label=_COPY)
    await context.ask(new, length, label=_NEW)


def _copied_and_new(context: LoadContext, length: int, changes: int) -> tuple[list[str], list[str]]:
    """Two prompts with the same answer, whose text the first one has with some changes."""
    start = context.draw.randrange(3_000, 20_000)  # `words` are below
    text = [f"w{number}" for number in range(start, start + length)]
    for at in range(1, changes + 1):
        text[at * length // (changes + 1)] = context.words(1)[0]
    last = f"w{start - 1}"
    return [*text, last], [*context.words(length), last]


def edit_ratios(requests: Sequence[TimedRequest]) -> dict[str, float]:
    """Tokens per second after the first."""
    return {
        f"tokens/s, {request.label}": (request.num_completion - 1)
        / (request.ended - request.times[0])
        for request in requests
    }


_TOGETHER = (1, 2, 4)


async def drafts(context: LoadContext, *, changes: int = 3) -> None:
    """Answers as in `edit`, one, two and four at once: all that copy, all that are new, then both kinds."""
    length = context.scaled(150)
    for count in _TOGETHER:
        pairs = [_copied_and_new(context, length, changes) for _ in range(count)]
        copied, new = zip(*pairs, strict=True)
        label = _together(count)
        await context.ask_all(copied, length, f"{label} that {'copies' if count == 1 else 'copy'}")
        await context.ask_all(new, length, f"{label} that {'is' if count == 1 else 'are'} new")
        if count > 1:
            mixed = [pair[at % 2] for at, pair in enumerate(pairs)]
            await context.ask_all(mixed, length, f"{label} of both kinds")


def drafts_ratios(requests: Sequence[TimedRequest]) -> dict[str, float]:
    """Tokens per second of each group, from its first token to its last."""
    groups: dict[str, list[TimedRequest]] = {}
    for request in requests:
        groups.setdefault(request.label, []).append(request)
    return {
        f"tokens/s, {label}": (sum(request.num_completion for request in group) - len(group))
        / (max(request.ended for request in group) - min(request.times[0] for request in group))
        for label, group in groups.items()
    }


def _together(count: int) -> str:
    return "1 answer" if count == 1 else f"{count} answers"


async def _at_most(limit: int, asks: Sequence[Awaitable[object]]) -> None:
    gate = asyncio.Semaphore(limit)

    async def one(ask: Awaitable[object]) -> None:
        async with gate:
            await ask

    await asyncio.gather(*(one(ask) for ask in asks))

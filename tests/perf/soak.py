"""Mixed load for as long as one likes: does memory stay flat, are all pages given back, and do
answers flow in the last minute as they did in the first?

People talk on, paste long texts, want several answers, seeded ones or ones of a given form, and
leave in the middle; the pool holds less than all of them want at times. Beside the answers' gaps
stands a fixed piece of work that the load's own process does: what the machine did to it, it did
to the server, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import random
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mlxserve.bench.client import LoadClient, TimedRequest, quantile
from mlxserve.bench.report import Figure, Report
from mlxserve.bench.servers import Contender, our_server
from mlxserve.errors import MlxServeError

_NUM_PAGES = 64
_NUM_PEOPLE = 4
_PAUSE_SECONDS = 3.0  # between two requests of a person, on average: other things run here, too
_WARM_UP_SECONDS = 15.0
_MINUTE = 60.0
_LONGEST = 200  # words of a conversation, before a new one begins
_PASTED = 60  # words of a long text in it
_MOST_WORDS = _LONGEST + _PASTED
_SAMPLE_SECONDS = 2.0  # between two looks at the memory
_WORK = bytes(8 << 20)  # to be hashed: some 10 ms
_WORK_SECONDS = 0.25  # between two such
_REST_SECONDS = 30.0  # that a server may take to end what it has

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 0.8, "top_p": 0.9, "seed": 7},
    "sampled": {"temperature": 1.0, "top_k": 40, "frequency_penalty": 0.3},
    "several": {"n": 2, "temperature": 0.7},
    "told": {"logprobs": 3},
    "formed": {"structured_outputs": {"regex": "[a-z]{1,8}( [a-z]{1,8}){2,12}"}},
}


class _Left(Exception):
    """A person left in the middle of an answer."""


@dataclass(slots=True)
class Observed:
    """What was seen, each with its time on the client's clock."""

    began: float = 0.0
    requests: list[TimedRequest] = field(default_factory=list)
    memory: list[tuple[float, int]] = field(default_factory=list)  # bytes
    work: list[tuple[float, float]] = field(default_factory=list)  # seconds that it took
    pages_left: int = 0  # still held by somebody when nobody was there


def bench_soak(
    model: str, *, minutes: int, progress: Callable[[str], None] = lambda _: None
) -> Report:
    """Start a server, load it for so many minutes, and look. Raises ServerFailed, SoakFailed."""
    with our_server("mlxserve", model, ("--num-pages", str(_NUM_PAGES))) as server:
        observed = asyncio.run(_soak(server, minutes, progress))
    settings = {"model": Path(model).name, "minutes": minutes, "pages": _NUM_PAGES}
    return Report("soak", settings, tuple(figures(observed, minutes)))


class SoakFailed(MlxServeError):
    """The server did not do what a soak is about."""


async def _soak(server: Contender, minutes: int, progress: Callable[[str], None]) -> Observed:
    assert server.process_id is not None, "a server of ours"
    observed = Observed()
    async with LoadClient(server.url, server.model) as client:
        await _stretch(client)
        people = [asyncio.create_task(_person(client, n)) for n in range(_NUM_PEOPLE)]
        await asyncio.sleep(_WARM_UP_SECONDS)
        observed.began = time.perf_counter()
        watching = [
            asyncio.create_task(_watch_memory(server.process_id, observed)),
            asyncio.create_task(_work(observed)),
        ]
        for minute in range(minutes):
            progress(f"minute {minute + 1} of {minutes}")
            await asyncio.sleep(_MINUTE)
            failed = [task for task in (*people, *watching) if task.done()]
            for task in failed:
                task.result()  # raises what it failed with
        for task in (*people, *watching):
            task.cancel()
        await asyncio.gather(*people, *watching, return_exceptions=True)
        observed.requests = client.requests
        observed.pages_left = await _pages_left(client)
    return observed


async def _stretch(client: LoadClient) -> None:
    """The longest prompts, all at once: what the largest steps take is no growth afterwards."""
    draw = random.Random("stretch")
    longest = [_words(draw, _MOST_WORDS) for _ in KINDS]
    await asyncio.gather(
        *(_ask(client, words, 16, kind, None) for words, kind in zip(longest, KINDS, strict=True))
    )


async def _person(client: LoadClient, number: int) -> None:
    """Talks on and on."""
    draw = random.Random(number)
    template = _words(random.Random("template"), 40)
    words: list[str] = []
    while True:
        if not words or len(words) > _LONGEST:
            words = [*template, *_words(draw, 8)]
        words = [*words, *_words(draw, _PASTED if draw.random() < 0.1 else 8)]
        kind = draw.choice(list(KINDS))
        leaves_after = draw.randint(1, 12) if draw.random() < 0.15 else None
        answer = await _ask(client, words, draw.randint(16, 64), kind, leaves_after)
        words = [*words, *answer]
        await asyncio.sleep(draw.expovariate(1 / _PAUSE_SECONDS))


async def _ask(
    client: LoadClient, words: Sequence[str], max_tokens: int, kind: str, leaves_after: int | None
) -> list[str]:
    """The words of the answer; none where the person left."""

    def on_text(request: TimedRequest) -> None:
        if len(request.times) == leaves_after:
            raise _Left

    with contextlib.suppress(_Left):
        prompt = " ".join(words)
        fields = KINDS[kind]
        request = await client.ask(prompt, max_tokens, label=kind, on_text=on_text, fields=fields)
        return request.text.split()
    return []


def _words(draw: random.Random, count: int) -> list[str]:
    return [f"w{draw.randrange(1, 3000)}" for _ in range(count)]


async def _watch_memory(process_id: int, observed: Observed) -> None:
    while True:
        size = await asyncio.to_thread(resident_bytes, process_id)
        observed.memory.append((time.perf_counter(), size))
        await asyncio.sleep(_SAMPLE_SECONDS)


async def _work(observed: Observed) -> None:
    while True:
        observed.work.append((time.perf_counter(), await asyncio.to_thread(_hash)))
        await asyncio.sleep(_WORK_SECONDS)


def _hash() -> float:
    started = time.perf_counter()
    hashlib.blake2b(_WORK)
    return time.perf_counter() - started


def resident_bytes(process_id: int) -> int:
    """Memory of a process that is in RAM. Raises SoakFailed where `ps` does not know it."""
    try:
        found = subprocess.run(
            ["ps", "-o", "rss=", "-p", str(process_id)], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError) as error:
        raise SoakFailed(f"`ps` says nothing about process {process_id}: {error}") from error
    return int(found.stdout) * 1024


async def _pages_left(client: LoadClient) -> int:
    """Pages that are neither free nor only cached, once nothing runs any more.

    The pages of an answer that was broken off are given back after the step it was in.
    """
    deadline = time.perf_counter() + _REST_SECONDS
    while True:
        state = await client.look("/api/v1/kv/stats")
        used, is_idle = int(state["pages"]["used"]), not any(state["requests"].values())
        if (is_idle and not used) or time.perf_counter() > deadline:
            break
        await asyncio.sleep(0.1)
    if not is_idle:
        raise SoakFailed(f"Requests run on {_REST_SECONDS:.0f} s after everybody left.")
    return used


def figures(observed: Observed, minutes: int) -> list[Figure]:
    """One value per minute, and then what is to be judged."""
    gaps = _by_minute(
        [
            (later, 1e3 * (later - earlier))
            for request in observed.requests
            if "n" not in KINDS.get(request.label, {})
            for earlier, later in zip(request.times, request.times[1:], strict=False)
        ],
        observed.began,
        minutes,
    )
    work = _by_minute([(at, 1e3 * t) for at, t in observed.work], observed.began, minutes)
    memory = _by_minute([(at, size / 1e6) for at, size in observed.memory], observed.began, minutes)
    p99s = tuple(quantile(values, 0.99) for values in gaps)
    works = tuple(quantile(values, 0.99) for values in work)
    errors = sum(request.error is not None for request in observed.requests)
    return [
        Figure("gap p50", "ms", tuple(quantile(values, 0.5) for values in gaps)),
        Figure("gap p99", "ms", p99s),
        Figure("a fixed piece of work, p99", "ms", works),
        Figure("memory", "MB", tuple(quantile(values, 0.5) for values in memory)),
        Figure("answers", "", tuple(float(n) for n in _ended(observed, minutes))),
        Figure("errors", "", (float(errors),)),
        Figure("pages not given back", "", (float(observed.pages_left),)),
        Figure("memory grows in the second half by", "MB/h", (slope_per_hour(observed),)),
        Figure("gap p99 over the first minute's", "", tuple(p99 / p99s[0] for p99 in p99s)),
        Figure("the same of the fixed work", "", tuple(time / works[0] for time in works)),
    ]


def _by_minute(
    values: Sequence[tuple[float, float]], began: float, minutes: int
) -> list[list[float]]:
    found: list[list[float]] = [[] for _ in range(minutes)]
    for at, value in values:
        minute = int((at - began) // _MINUTE)
        if 0 <= minute < minutes:
            found[minute].append(value)
    return found


def _ended(observed: Observed, minutes: int) -> list[int]:
    ends = [(e.ended, 1.0) for e in observed.requests if e.ended]
    return [len(values) for values in _by_minute(ends, observed.began, minutes)]


def slope_per_hour(observed: Observed) -> float:
    """MB per hour, by least squares over the second half: in the first, caches and pools fill."""
    at, size = np.array(observed.memory[len(observed.memory) // 2 :]).T
    return float(np.polyfit((at - at[0]) / 3600, size / 1e6, 1)[0])

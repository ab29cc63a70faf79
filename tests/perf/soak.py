"""A long mixed load: is memory flat, are all pages released, and are answers as fast at the end as
at the beginning?

Clients hold conversations, paste long texts, ask for several answers, seeded or structured ones, and
disconnect in the middle; at times the pool is too small for all of them. As a control, the load's
own process times a fixed piece of work: what slows that down slows the server down, too.
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

import httpx
import numpy as np

from mlxserve.bench.client import LoadClient, TimedRequest
from mlxserve.bench.report import Figure, Report, quantile
from mlxserve.bench.servers import Contender, our_server
from mlxserve.core.errors import MlxServeError

NUM_PAGES = 64
_NUM_PEOPLE = 4
_PAUSE_SECONDS = 3.0  # mean pause of a client between two requests
_WARM_UP_SECONDS = 15.0
_MINUTE = 60.0
_LONGEST = 200  # words of a conversation before a new one begins
_PASTED = 60  # words of a long text in it
MAX_WORDS = _LONGEST + _PASTED
_SAMPLE_SECONDS = 2.0  # between two samples of the memory
_WORK = bytes(8 << 20)  # to hash, in about 10 ms
_WORK_SECONDS = 0.25  # between two pieces of work
_REST_SECONDS = 30.0  # for the server to finish all requests

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 0.8, "top_p": 0.9, "seed": 7},
    "sampled": {"temperature": 1.0, "top_k": 40, "frequency_penalty": 0.3},
    "several": {"n": 2, "temperature": 0.7},
    "told": {"logprobs": 3},
    "formed": {"structured_outputs": {"regex": "[a-z]{1,8}( [a-z]{1,8}){2,12}"}},
}


class _Disconnected(Exception):
    """The client disconnected in the middle of an answer."""


@dataclass(slots=True)
class Observed:
    """Observations, each with its time on the client's clock."""

    began: float = 0.0
    requests: list[TimedRequest] = field(default_factory=list)
    memory: list[tuple[float, int]] = field(default_factory=list)  # bytes
    work: list[tuple[float, float]] = field(default_factory=list)  # seconds of each piece
    pages_left: int = 0  # held after all requests ended


def bench_soak(
    model: str, *, minutes: int, progress: Callable[[str], None] = lambda _: None
) -> Report:
    """Start a server and load it for `minutes`. Raises ServerFailed, SoakFailed."""
    with our_server("mlxserve", model, ("--num-pages", str(NUM_PAGES))) as server:
        observed = asyncio.run(_soak(server, minutes, progress))
    settings = {"model": Path(model).name, "minutes": minutes, "pages": NUM_PAGES}
    return Report("soak", settings, tuple(figures(observed, minutes)))


class SoakFailed(MlxServeError):
    """The server cannot be observed, or its requests do not end."""


async def _soak(server: Contender, minutes: int, progress: Callable[[str], None]) -> Observed:
    assert server.process_id is not None, "a server of ours"
    observed = Observed()
    async with LoadClient(server.url, server.model) as client:
        await _send_longest(client)
        people = [asyncio.create_task(_converse(client, n)) for n in range(_NUM_PEOPLE)]
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
        observed.pages_left = await _pages_left(server.url)
    return observed


async def _send_longest(client: LoadClient) -> None:
    """Send the longest prompts at once, so that the largest steps' memory does not count as growth."""
    draw = random.Random("stretch")
    longest = [random_words(draw, MAX_WORDS) for _ in KINDS]
    await asyncio.gather(
        *(ask(client, words, 16, kind, None) for words, kind in zip(longest, KINDS, strict=True))
    )


async def _converse(client: LoadClient, number: int) -> None:
    """One client's endless conversations."""
    draw = random.Random(number)
    template = random_words(random.Random("template"), 40)
    words: list[str] = []
    while True:
        if not words or len(words) > _LONGEST:
            words = [*template, *random_words(draw, 8)]
        words = [*words, *random_words(draw, _PASTED if draw.random() < 0.1 else 8)]
        kind = draw.choice(list(KINDS))
        leaves_after = draw.randint(1, 12) if draw.random() < 0.15 else None
        answer = await ask(client, words, draw.randint(16, 64), kind, leaves_after)
        words = [*words, *answer]
        await asyncio.sleep(draw.expovariate(1 / _PAUSE_SECONDS))


async def ask(
    client: LoadClient, words: Sequence[str], max_tokens: int, kind: str, leaves_after: int | None
) -> list[str]:
    """The words of the answer; none if the client disconnected."""

    def on_text(request: TimedRequest) -> None:
        if len(request.times) == leaves_after:
            raise _Disconnected

    with contextlib.suppress(_Disconnected):
        prompt = " ".join(words)
        fields = KINDS[kind]
        request = await client.ask(prompt, max_tokens, label=kind, on_text=on_text, fields=fields)
        return request.text.split()
    return []


def random_words(draw: random.Random, count: int) -> list[str]:
    return [f"w{draw.randrange(1, 3000)}" for _ in range(count)]


async def _watch_memory(process_id: int, observed: Observed) -> None:
    while True:
        size = await asyncio.to_thread(resident_bytes, process_id)
        observed.memory.append((time.perf_counter(), size))
        await asyncio.sleep(_SAMPLE_SECONDS)


async def _work(observed: Observed) -> None:
    while True:
        observed.work.append((time.perf_counter(), await asyncio.to_thread(_seconds_to_hash)))
        await asyncio.sleep(_WORK_SECONDS)


def _seconds_to_hash() -> float:
    started = time.perf_counter()
    hashlib.blake2b(_WORK)
    return time.perf_counter() - started


def resident_bytes(process_id: int) -> int:
    """Resident memory of a process. Raises SoakFailed if `ps` does not know it."""
    try:
        found = subprocess.run(
            ["ps", "-o", "rss=", "-p", str(process_id)], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError) as error:
        raise SoakFailed(f"`ps` does not know process {process_id}: {error}") from error
    return int(found.stdout) * 1024


async def _pages_left(url: str) -> int:
    """Pages in use after all requests have ended.

    The pages of an aborted answer are released after its last step.
    """
    deadline = time.perf_counter() + _REST_SECONDS
    async with httpx.AsyncClient(base_url=url, trust_env=False) as client:
        while True:
            state = (await client.get("/api/v1/kv/stats")).raise_for_status().json()
            used, is_idle = int(state["pages"]["used"]), not any(state["requests"].values())
            if (is_idle and not used) or time.perf_counter() > deadline:
                break
            await asyncio.sleep(0.1)
    if not is_idle:
        raise SoakFailed(
            f"Requests are still running {_REST_SECONDS:.0f} s after all clients disconnected."
        )
    return used


def figures(observed: Observed, minutes: int) -> list[Figure]:
    """One value per minute, then the figures to judge."""
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
        Figure("fixed piece of work, p99", "ms", works),
        Figure("memory", "MB", tuple(quantile(values, 0.5) for values in memory)),
        Figure("answers", "", tuple(float(n) for n in _ended(observed, minutes))),
        Figure("errors", "", (float(errors),)),
        Figure("pages not released", "", (float(observed.pages_left),)),
        Figure("memory growth in the second half", "MB/h", (slope_per_hour(observed),)),
        Figure("gap p99 over the first minute's", "", tuple(p99 / p99s[0] for p99 in p99s)),
        Figure("fixed work over the first minute's", "", tuple(time / works[0] for time in works)),
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
    """MB per hour by least squares over the second half; caches and pools fill in the first."""
    at, size = np.array(observed.memory[len(observed.memory) // 2 :]).T
    return float(np.polyfit((at - at[0]) / 3600, size / 1e6, 1)[0])

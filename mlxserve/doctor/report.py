"""`mlxserve doctor`: what this machine is, how fast it computes, and whether an answer comes out.

    findings = list(diagnose())

Each finding is one line of a table that can be pasted into a report. Checks run one after another
and each stands alone, so that a broken one does not hide the next.
"""

from __future__ import annotations

import asyncio
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from mlxserve import machine
from mlxserve.config import EngineConfig
from mlxserve.doctor.kernels import examine
from mlxserve.errors import MlxServeError
from mlxserve.sampling_params import SamplingParams

if TYPE_CHECKING:
    import mlx.core as mx

    from mlxserve.chat import Chat

# A word to be found again several pages later. A wrong page, mask or position loses it.
EXPECTED = "lantern"
_FILLER = " ".join(f"Line {number} of the log says that all is well." for number in range(12))
QUESTION = f"The code word is {EXPECTED}. {_FILLER} What is the code word?"
_SLOW_GFLOPS = 10.0  # mlx's reference BLAS reaches about 2; any real one, more than 20


class Grade(StrEnum):
    OK = "ok"
    SLOW = "slow"
    BROKEN = "BROKEN"
    FACT = ""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    name: str
    value: str
    grade: Grade = Grade.FACT

    @property
    def is_broken(self) -> bool:
        return self.grade is Grade.BROKEN

    def __str__(self) -> str:
        return f"{self.grade:<7}{self.name:<16}{self.value}"


def diagnose(config: EngineConfig | None = None) -> Iterator[Finding]:
    """All findings, each as soon as it is known. `config`: of the engine for the self-test."""
    with warnings.catch_warnings():
        # A slow BLAS is a finding here, said below in its own line.
        warnings.simplefilter("ignore", machine.SlowBlasWarning)
        for name, value in machine.facts().items():
            yield Finding(name, value)
    for name, value, grade in examine():
        yield Finding(name, value, Grade(grade))
    yield measure_matmul()
    yield self_test(config or EngineConfig(max_num_seqs=4, disable_log_stats=True))


def measure_matmul() -> Finding:
    """float32, the best of three: how fast prompts can be computed at all."""
    import mlx.core as mx

    size = 4096 if machine.is_metal() else 1024
    a = mx.random.normal((size, size))
    mx.eval(a, a @ a)  # the first one also compiles
    seconds = min(_timed_matmul(a) for _ in range(3))
    gflops = 2 * size**3 / seconds / 1e9
    grade = Grade.OK if gflops >= _SLOW_GFLOPS else Grade.SLOW
    return Finding("matmul", f"{gflops:.0f} GFLOP/s in float32 at {size} x {size}", grade)


def self_test(config: EngineConfig) -> Finding:
    """Load the model, ask for a word across pages, ask again from the cache, audit the pages."""
    started = time.perf_counter()
    try:
        answers = asyncio.run(_ask_twice(config))
    except MlxServeError as error:
        return Finding("self-test", f"the model does not answer: {error}", Grade.BROKEN)
    seconds = time.perf_counter() - started
    for text, num_cached in answers:
        if EXPECTED not in text:
            value = f"the word {EXPECTED!r} was asked for ({num_cached} tokens cached), {text[:60]!r} came"
            return Finding("self-test", value, Grade.BROKEN)
    if config.enable_prefix_caching and not answers[1][1]:
        return Finding("self-test", "a repeated prompt was not found in the cache", Grade.BROKEN)
    value = f"a word is recalled across pages, computed and cached, in {seconds:.1f} s with loading"
    return Finding("self-test", value, Grade.OK)


async def _ask_twice(config: EngineConfig) -> list[tuple[str, int]]:
    """(text, cached tokens) of the same question, cold and from the cache."""
    from mlxserve.build import build_chat

    chat = await asyncio.to_thread(build_chat, config)
    try:
        answers = [await _ask(chat), await _ask(chat)]
        await chat.check()
        return answers
    finally:
        chat.close()


async def _ask(chat: Chat) -> tuple[str, int]:
    prompt = chat.render([{"role": "user", "content": QUESTION}])
    answer = await chat.submit(prompt, SamplingParams(temperature=0, max_tokens=32))
    deltas = [delta async for delta in answer]
    usage = deltas[-1].usage
    assert usage is not None
    return "".join(delta.text for delta in deltas), usage.cached_tokens


def _timed_matmul(a: mx.array) -> float:
    import mlx.core as mx  # not before machine.prepare() has run

    started = time.perf_counter()
    mx.eval(a @ a)
    return time.perf_counter() - started

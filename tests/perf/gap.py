"""The longest gap of a decoding stream while a long prompt is computed."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from itertools import pairwise

from mlxserve import AsyncLLM, SamplingParams
from mlxserve.bench.report import Figure, Report

_IDLE_TOKENS = 48  # of the running stream, before the long prompt arrives


def bench_gap(model: str, *, runs: int, prompt_length: int, max_num_batched_tokens: int) -> Report:
    """The running stream's longest gap next to its step time when it is alone."""
    return asyncio.run(_bench(model, runs, prompt_length, max_num_batched_tokens))


async def _bench(model: str, runs: int, prompt_length: int, max_num_batched_tokens: int) -> Report:
    llm = AsyncLLM(
        model,
        num_pages=2 + (prompt_length + 2048) // 32,
        max_num_batched_tokens=max_num_batched_tokens,
        disable_log_stats=True,
    )
    draw = random.Random(0)
    idle, gaps, first_token = [], [], []
    try:
        for _ in range(runs + 1):
            step, gap, ttft = await _run(llm, draw, prompt_length)
            idle.append(step)
            gaps.append(gap)
            first_token.append(ttft)
    finally:
        llm.close()
    idle, gaps, first_token = idle[1:], gaps[1:], first_token[1:]  # the first one warms up
    return Report(
        "gap",
        {
            "model": model,
            "prompt": prompt_length,
            "max_num_batched_tokens": max_num_batched_tokens,
            "runs": runs,
        },
        (
            Figure("idle step of the stream", "ms", tuple(1e3 * s for s in idle)),
            Figure("longest gap meanwhile", "ms", tuple(1e3 * g for g in gaps)),
            Figure("gap in idle steps", "", tuple(g / s for g, s in zip(gaps, idle, strict=True))),
            Figure("first token of the long prompt", "s", tuple(first_token)),
        ),
    )


async def _run(
    llm: AsyncLLM, draw: random.Random, prompt_length: int
) -> tuple[float, float, float]:
    """(median idle step, longest gap, time to the long prompt's first token) in seconds."""
    times: list[float] = []
    enough = asyncio.Event()

    async def stream() -> None:
        params = SamplingParams(max_tokens=2000, temperature=0, ignore_eos=True)
        async for _ in llm.stream([draw.randrange(1000) for _ in range(64)], params):
            times.append(time.perf_counter())
            if len(times) == _IDLE_TOKENS:
                enough.set()

    running = asyncio.create_task(stream())
    await enough.wait()
    before, start = len(times), time.perf_counter()
    prompt = [draw.randrange(1000) for _ in range(prompt_length)]
    await llm.generate(prompt, SamplingParams(max_tokens=1, temperature=0))
    ttft = time.perf_counter() - start
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    idle = statistics.median(b - a for a, b in pairwise(times[8:before]))
    # A stream that got no token while the prompt was computed stalled for all of that time.
    gap = max(b - a for a, b in pairwise([*times[before - 1 :], start + ttft]))
    return idle, gap, ttft

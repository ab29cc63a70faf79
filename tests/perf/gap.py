"""The longest gap of a decoding stream while a long prompt is computed, or an image."""

from __future__ import annotations

import asyncio
import copy
import random
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from mlxserve import AsyncLLM, SamplingParams
from mlxserve.bench.report import Figure, Report
from tests.model.small_vision import VISION_MODELS, write_vision_model

_IDLE_TOKENS = 48  # of the running stream, before the long prompt arrives
_ONE = SamplingParams(max_tokens=1, temperature=0)
_KIND = "qwen3_vl"
_PIXELS = 32  # of a row of the image, in each direction
# A text that decodes as fast as its tower has small pieces; the attention of a layer would take many steps.
_LARGER: dict[str, dict[str, Any]] = {
    "text_config": {
        "hidden_size": 512,
        "num_hidden_layers": 12,
        "intermediate_size": 1536,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "max_position_embeddings": 8192,
    },
    "vision_config": {
        "depth": 4,
        "hidden_size": 384,
        "intermediate_size": 1536,
        "num_heads": 6,
        "out_hidden_size": 512,
    },
}


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
            step, gap, ttft = await _run(llm, draw, lambda: _text(llm, draw, prompt_length))
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


async def _text(llm: AsyncLLM, draw: random.Random, length: int) -> None:
    await llm.generate([draw.randrange(1000) for _ in range(length)], _ONE)


async def _image(llm: AsyncLLM, draw: random.Random, side: int) -> None:
    pixels = np.random.RandomState(draw.randrange(1 << 31)).randint(0, 256, (side, side, 3))
    parts = [{"type": "image", "image": pixels.astype(np.uint8)}]
    await llm.chat([{"role": "user", "content": parts}], _ONE)


def bench_image_gap(*, runs: int, side: int) -> Report:
    """The running stream's longest gap beside an image, beside a text of as many rows, and beside another text.

    In seconds of the CPU, which other processes do not lengthen.
    """
    with tempfile.TemporaryDirectory() as folder:
        files = copy.deepcopy(VISION_MODELS[_KIND])
        for part, sizes in _LARGER.items():
            files["config"][part] |= sizes
        files["preprocessor"]["max_pixels"] = side * side
        model = write_vision_model(Path(folder), _KIND, files)
        return asyncio.run(_bench_image(str(model), runs, side))


async def _bench_image(model: str, runs: int, side: int) -> Report:
    num_rows = (side // _PIXELS) ** 2
    llm = AsyncLLM(model, num_pages=512, max_num_batched_tokens=2048, disable_log_stats=True)
    draw = random.Random(0)
    others = {
        "a text": lambda: _text(llm, draw, num_rows),
        "another text": lambda: _text(llm, draw, num_rows),
        "an image": lambda: _image(llm, draw, side),
    }
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in others}
    try:
        for number in range(runs + 1):
            for name, other in others.items():
                run = await _run(llm, draw, other, time.process_time)
                if number:  # the first round warms up
                    found[name].append(run)
    finally:
        llm.close()
    gaps = {name: [gap / step for step, gap, _ in each] for name, each in found.items()}
    more = {name: map(float.__sub__, gaps[name], gaps["a text"]) for name in list(gaps)[1:]}
    return Report(
        "gap",
        {"image": f"{side} x {side}", "rows": num_rows, "runs": runs},
        (
            *(
                Figure("idle step, CPU", "ms", tuple(1e3 * s for s, *_ in v), k)
                for k, v in found.items()
            ),
            *(Figure("longest gap in idle steps", "", tuple(v), k) for k, v in gaps.items()),
            *(Figure("more than beside a text", "", tuple(v), k) for k, v in more.items()),
            *(
                Figure("its first token, CPU", "s", tuple(t for *_, t in v), k)
                for k, v in found.items()
            ),
        ),
    )


async def _run(
    llm: AsyncLLM,
    draw: random.Random,
    other: Callable[[], Awaitable[Any]],
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[float, float, float]:
    """(median idle step, longest gap, time to the other's first token) in seconds."""
    times: list[float] = []
    enough = asyncio.Event()

    async def stream() -> None:
        params = SamplingParams(max_tokens=2000, temperature=0, ignore_eos=True)
        async for _ in llm.stream([draw.randrange(1000) for _ in range(64)], params):
            times.append(clock())
            if len(times) == _IDLE_TOKENS:
                enough.set()

    running = asyncio.create_task(stream())
    await enough.wait()
    before, start = len(times), clock()
    await other()
    ttft = clock() - start
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    idle = statistics.median(b - a for a, b in pairwise(times[8:before]))
    # A stream that got no token while the prompt was computed stalled for all of that time.
    gap = max(b - a for a, b in pairwise([*times[before - 1 :], start + ttft]))
    return idle, gap, ttft

"""Model speed on this machine, in our engine and in mlx-lm's own loop.

Each function runs in a process of its own (`child.py`), so that one model is in memory at a time
and its peak is its own. They return figures by the names that `figures.py` shows beside each other.
"""

from __future__ import annotations

import logging
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from logging.handlers import BufferingHandler
from typing import Any

import mlx.core as mx

from mlxserve.build import build_engine
from mlxserve.cache.kv import KVPool
from mlxserve.core.config import EngineConfig
from mlxserve.core.sampling_params import SamplingParams
from mlxserve.engine.engine import Engine
from mlxserve.hub.files import find_model
from mlxserve.model.attention import choose_attention
from mlxserve.model.load import load, read_model
from mlxserve.model.row_speeds import measure_rows
from mlxserve.model.runner import ModelRunner
from mlxserve.model.sizing import default_step_budget
from mlxserve.model.step_graphs import TIMES_BEFORE
from mlxserve.request import Chunk, LiveRequest, Request, as_page_table
from mlxserve.system import machine, metal_memory

PROMPTS = (512, 2048)
# Tokens of the decoded answer's prompt, and of the answer.
CONTEXT, ANSWER = 128, 64
HOST_CONTEXT = 1000
# Recurrent states of the steps that are timed: those of large models are 150 MiB each.
_NUM_SLOTS = 24
_PAGE_SIZE = 32
_ROUNDS = 2  # after one that warms up; the best counts
_BUILDS = 20
_LOGGERS = ("mlxserve", "metal_kernels")
_MAX_RECORDS = 10_000  # bound of log records; a log has a few dozen
_LIMITS = ("MLX_MAX_OPS_PER_BUFFER", "MLX_MAX_MB_PER_BUFFER")

Figures = dict[str, float]


def chosen(model: str) -> dict[str, Any]:
    """Return the engine's choices for this model with default options, and its log."""
    config = default_step_budget(
        EngineConfig().with_options(model=model, disable_log_stats=True),
        is_metal=machine.is_metal(),
    )
    with _recorded_log() as records:
        engine, _ = build_engine(config, find_model(model))
        try:
            snapshot, wired = engine.monitor.snapshot(), _wired()
        finally:
            engine.close()
    return {
        "pages": len(snapshot.pages),
        "page size": snapshot.page_size,
        "longest context": engine.max_model_len,
        "rows of a step": config.scheduler.step_budget,
        "freed memory that mlx keeps": _cache_limit(),
        "wired memory": wired,
        **{name: os.environ.get(name, "mlx's own default") for name in _LIMITS},
        "log": [record.getMessage() for record in records],
    }


def _wired() -> str:
    limits = metal_memory.METAL_MEMORY.limits
    return "none" if limits is None else f"{limits.wired / 1e6:.0f} MB"


def _cache_limit() -> str:
    """Return the cache limit in MB, which mlx tells only when it is set."""
    limit = mx.set_cache_limit(0)
    mx.set_cache_limit(limit)
    return f"{limit / 1e6:.0f} MB"


@contextmanager
def _recorded_log() -> Iterator[list[logging.LogRecord]]:
    """Record our loggers from level INFO in this block."""
    handler = BufferingHandler(_MAX_RECORDS)
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
    try:
        yield handler.buffer
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.removeHandler(handler)
            logger.setLevel(level)


def ours(
    model: str,
    prompts: Sequence[int] = PROMPTS,
    context: int = CONTEXT,
    answer: int = ANSWER,
) -> Figures:
    """Measure tokens per second of prompts and of an answer, and the prompts' peak memory."""
    longest = max(*prompts, context + answer)
    config = EngineConfig().with_options(
        model=model,
        num_pages=2 + -(-longest // _PAGE_SIZE),
        page_size=_PAGE_SIZE,
        max_num_batched_tokens=max(*prompts, EngineConfig().scheduler.max_num_seqs),
        enable_prefix_caching=False,
        disable_log_stats=True,
    )
    engine, _ = build_engine(config, find_model(model))

    def stream(num_prompt: int, num_answer: int) -> list[float]:
        return _times_of(engine, num_prompt, num_answer)

    try:
        return _figures(stream, [n for n in prompts if n < engine.max_model_len], context, answer)
    finally:
        engine.close()


def _times_of(engine: Engine, num_prompt: int, num_answer: int) -> list[float]:
    params = SamplingParams(max_tokens=num_answer, temperature=0, ignore_eos=True)
    engine.add(Request("speed", prompt_ids(num_prompt), params))
    times = []
    while engine.has_work:
        num_tokens = sum(len(output.token_ids) for output in engine.step())
        times += [time.perf_counter()] * num_tokens
    return times


def theirs(
    model: str,
    prompts: Sequence[int] = PROMPTS,
    context: int = CONTEXT,
    answer: int = ANSWER,
) -> Figures:
    """Measure mlx-lm's `generate_step`, and the building of its step's graph."""
    from mlx_lm.generate import generate_step
    from mlx_lm.models.cache import make_prompt_cache
    from mlx_lm.utils import dequantize_model

    dense, config = read_model(find_model(model), is_metal=machine.is_metal())
    if not machine.is_metal():  # float32, as ours: other dtypes are 70 times slower on a CPU
        dense = dequantize_model(dense)
        dense.set_dtype(mx.float32)
    longest = int(config.get("max_position_embeddings", max(prompts)))

    def stream(num_prompt: int, num_answer: int) -> list[float]:
        steps = generate_step(
            mx.array(prompt_ids(num_prompt)),
            dense,
            max_tokens=num_answer,
            prefill_step_size=max(prompts),
        )
        return [time.perf_counter() for _ in steps]

    figures = _figures(stream, [n for n in prompts if n < longest], context, answer)
    cache = make_prompt_cache(dense)
    at = min(HOST_CONTEXT, longest // 2)
    mx.eval(dense(mx.array([prompt_ids(at)]), cache=cache))
    token = mx.array([[0]])

    def build() -> object:
        logits = dense(token, cache=cache)[:, -1, :]
        return mx.argmax(logits - mx.logsumexp(logits, axis=-1, keepdims=True), axis=-1)

    return {**figures, "host": _milliseconds(build)}


def host(model: str) -> Figures:
    """CPU milliseconds to build one decode's graph, which a GPU may have to wait for."""
    memory = machine.memory()
    is_metal = machine.is_metal()
    loaded = load(find_model(model), is_metal=is_metal, memory_limit=memory.working_set)
    loaded, backends, _ = choose_attention("auto", loaded)
    at = min(HOST_CONTEXT, loaded.max_length // 2)
    num_pages = 1 + (at + _BUILDS) // _PAGE_SIZE
    kv = KVPool(loaded.layers, num_pages, _PAGE_SIZE, backends)
    runner = ModelRunner(loaded, kv)
    request = LiveRequest(Request("host", [0] * (at + 1), SamplingParams(temperature=0)))
    chunk = Chunk(request, at, 1, as_page_table(range(num_pages)), samples=True)
    return {"host": _milliseconds(lambda: runner.build([chunk]))}


def rows(model: str | None) -> Figures:
    """Milliseconds of a step by its rows: what the rows of drafts cost on this machine."""
    memory = machine.memory()
    loaded = load(find_model(model), is_metal=machine.is_metal(), memory_limit=memory.working_set)
    loaded, backends, _ = choose_attention("auto", loaded)
    table, _ = measure_rows(loaded, backends, _PAGE_SIZE, num_slots=_NUM_SLOTS)
    return {str(num_rows): 1e3 * seconds for num_rows, seconds in table.items()}


def _milliseconds(build: Callable[[], object]) -> float:
    """CPU time of this thread per graph, once it is recorded; nothing is computed."""
    for _ in range(TIMES_BEFORE + 1):
        build()
    began = time.thread_time()
    for _ in range(_BUILDS):
        build()
    return 1e3 * (time.thread_time() - began) / _BUILDS


def _figures(
    stream: Callable[[int, int], list[float]], prompts: Sequence[int], context: int, answer: int
) -> Figures:
    """Compute the figures; `stream` generates from a prompt and returns each token's time."""
    figures: Figures = {}
    for num_prompt in prompts:
        rates, peaks = [], []
        for _ in range(_ROUNDS + 1):
            before = mx.get_active_memory()
            mx.reset_peak_memory()
            began = time.perf_counter()
            rates.append(num_prompt / (stream(num_prompt, 1)[0] - began))
            peaks.append(mx.get_peak_memory() - before)
        figures[f"prefill {num_prompt}"] = max(rates[1:])
        figures[f"peak {num_prompt}"] = max(peaks) / 1e6
    rates = []
    for _ in range(_ROUNDS + 1):
        times = stream(context, answer)
        rates.append((len(times) - 1) / (times[-1] - times[0]))
    return {**figures, "decode": max(rates[1:])}


def prompt_ids(length: int) -> list[int]:
    draw = random.Random(0)
    return [draw.randrange(1000) for _ in range(length)]

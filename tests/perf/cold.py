"""What the prefix cache costs where it finds nothing: CPU time of prompts that have nothing in common.

Three engines, one with the cache and two without it, are given the same prompts, in turn first: of a model
with attention alone, then of one with recurrent states, whose snapshots are kept after pages. Pages are few
by default, so that the cache also evicts, and nothing is preempted.

Two engines without any difference can differ by several per cent for as long as their processes live, which
is more than what is looked for. So each engine has a process of its own, several rounds of processes are
measured one after another, and the second engine without the cache says how far such a ratio may be trusted:
its own should be 1. Steps have no target for their time unless one is asked for: otherwise chunks are as long
as what was measured so far allows, and two sides compute different steps.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlxserve import LLM, SamplingParams
from mlxserve.bench.report import Figure, Report, ratios
from mlxserve.system import machine
from tests.conftest import write_model

# Layers large enough that a step's numbers count, and small enough for a minute of a CPU.
_COMMON: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 2048,
}
GEOMETRIES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "qwen3_next": {
        "full_attention_interval": 4,
        "linear_num_value_heads": 8,
        "linear_num_key_heads": 8,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "mlp_only_layers": list(range(8)),
    },
}
_PAGE_SIZE = 32
_STATE_SLOTS = 32
_VOCABULARY = 250  # token ids that every model has

WITH_CACHE, WITHOUT, CONTROL = "with the cache", "without it", "without it, again"


@dataclass(frozen=True, slots=True)
class Load:
    """`prompts` of `length` tokens at once, and an answer of `tokens` to each."""

    prompts: int
    length: int
    tokens: int
    num_pages: int
    itl_target_ms: float


def bench_cold(
    load: Load,
    kinds: Sequence[str],
    *,
    processes: int,
    pairs: int,
    progress: Callable[[str], None],
) -> Report:
    """For each of `kinds`: `processes` rounds of three processes, each with `pairs` runs of the load after
    one that warms up.

    A process's ratio is that of its CPU time to its neighbour's, both summed over its runs.

    kinds: names in GEOMETRIES
    """
    figures: list[Figure] = []
    for kind in kinds:
        spent: list[dict[str, float]] = []
        with tempfile.TemporaryDirectory() as folder:
            write_model(Path(folder), kind, **_COMMON, **GEOMETRIES[kind])
            for number in range(processes):
                progress(f"{kind}: processes {number + 1} of {processes}")
                spent.append(_round(folder, load, number, pairs))
        with_cache, without, control = (
            tuple(seconds[side] for seconds in spent) for side in (WITH_CACHE, WITHOUT, CONTROL)
        )
        alone = tuple(map(statistics.mean, zip(without, control, strict=True)))
        figures += [
            Figure(f"{kind}: CPU {WITH_CACHE}", "s", with_cache),
            Figure(f"{kind}: CPU {WITHOUT}", "s", alone),
            *_ratio(f"{kind}: {WITH_CACHE}, relative", with_cache, alone),
            *_ratio(f"{kind}: control, relative", control, without),
        ]
    settings = {
        "processes": processes,
        "pairs": pairs,
        "prompts": load.prompts,
        "length": load.length,
        "tokens": load.tokens,
        "pages": load.num_pages,
        "itl_target_ms": load.itl_target_ms,
    }
    return Report("cold", settings, tuple(figures))


def _ratio(name: str, ours: Sequence[float], theirs: Sequence[float]) -> Iterator[Figure]:
    """The ratios and, of more than one, their mean and its standard error."""
    values = ratios(ours, theirs)
    yield Figure(name, "", values)
    if len(values) > 1:
        yield Figure(f"{name}: mean", "", (statistics.mean(values),))
        error = statistics.stdev(values) / math.sqrt(len(values))
        yield Figure(f"{name}: standard error of the mean", "", (error,))


def _round(folder: str, load: Load, number: int, pairs: int) -> dict[str, float]:
    """Seconds of CPU of each side's process, all three started for this round."""
    sides = [WITH_CACHE, WITHOUT, CONTROL]
    sides = sides[number % 3 :] + sides[: number % 3]
    spent = dict.fromkeys(sides, 0.0)
    with contextlib.ExitStack() as stack:
        engines = {
            side: stack.enter_context(_process(folder, side == WITH_CACHE, load)) for side in sides
        }
        for pair in range(pairs + 1):
            draw = random.Random(1000 * number + pair)
            prompts = [
                [draw.randrange(1, _VOCABULARY) for _ in range(load.length)]
                for _ in range(load.prompts)
            ]
            for side in sides[pair % 3 :] + sides[: pair % 3]:
                seconds = engines[side].submit(_seconds, prompts, load.tokens).result()
                if pair:  # the first one warms up
                    spent[side] += seconds
    return spent


@contextlib.contextmanager
def _process(folder: str, has_cache: bool, load: Load) -> Iterator[ProcessPoolExecutor]:
    """A process with an engine, which is closed at the end."""
    with ProcessPoolExecutor(
        max_workers=1, mp_context=multiprocessing.get_context("spawn")
    ) as process:
        process.submit(_build, folder, has_cache, load).result()
        try:
            yield process
        finally:
            process.submit(_close).result()


# Of the process that computes.
_engines: list[LLM] = []


def _build(folder: str, has_cache: bool, load: Load) -> None:
    machine.prepare()
    _engines.append(
        LLM(
            folder,
            num_pages=load.num_pages,
            page_size=_PAGE_SIZE,
            num_state_slots=_STATE_SLOTS,
            enable_prefix_caching=has_cache,
            disk_cache_size=0,
            itl_target_ms=load.itl_target_ms,
            disable_log_stats=True,
        )
    )


def _seconds(prompts: list[list[int]], tokens: int) -> float:
    """CPU time of all threads of this process."""
    params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
    began = time.process_time()
    _engines[0].generate(prompts, params, use_tqdm=False)
    return time.process_time() - began


def _close() -> None:
    _engines.pop().close()

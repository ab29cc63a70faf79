"""What the prefix cache costs where it finds nothing: CPU time of prompts that have nothing in common.

Two engines of one process, with the cache and without it, are given the same prompts, in turn first: of a
model with attention alone, then of one with recurrent states, whose snapshots are kept behind pages. Pages
are few, so that the cache also evicts, and nothing is preempted. Steps have no target for their time:
otherwise chunks are as long as what was measured so far allows, and two sides compute different steps.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mlxserve import LLM, SamplingParams
from mlxserve.bench.report import Figure, Report
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
# Enough for all prompts of a round and their answers, not for two rounds'.
_NUM_PAGES, _PAGE_SIZE = 192, 32
_STATE_SLOTS = 32
_VOCABULARY = 250  # token ids that every model has


def bench_cold(
    *, pairs: int, prompts: int, length: int, tokens: int, progress: Callable[[str], None]
) -> Report:
    """`prompts` of `length` tokens at once, and an answer of `tokens` to each."""
    figures: list[Figure] = []
    for kind, sizes in GEOMETRIES.items():
        with tempfile.TemporaryDirectory() as folder:
            write_model(Path(folder), kind, **_COMMON, **sizes)
            engines = {has_cache: _engine(folder, has_cache) for has_cache in (True, False)}
        try:
            seconds: dict[bool, list[float]] = {True: [], False: []}
            for number in range(pairs + 1):
                progress(f"{kind}: pair {number} of {pairs}")
                draw = random.Random(number)
                cold = [
                    [draw.randrange(1, _VOCABULARY) for _ in range(length)] for _ in range(prompts)
                ]
                for has_cache in (True, False) if number % 2 else (False, True):
                    spent = _seconds(engines[has_cache], cold, tokens)
                    if number:  # the first pair warms up
                        seconds[has_cache].append(spent)
        finally:
            for engine in engines.values():
                engine.close()
        ratios = tuple(a / b for a, b in zip(seconds[True], seconds[False], strict=True))
        figures += [
            Figure(f"{kind}: CPU with the cache", "s", tuple(seconds[True])),
            Figure(f"{kind}: CPU without it", "s", tuple(seconds[False])),
            Figure(f"{kind}: ratio", "", ratios),
        ]
    settings = {"pairs": pairs, "prompts": prompts, "length": length, "tokens": tokens}
    return Report("cold", settings, tuple(figures))


def _engine(folder: str, has_cache: bool) -> LLM:
    return LLM(
        folder,
        num_pages=_NUM_PAGES,
        page_size=_PAGE_SIZE,
        num_state_slots=_STATE_SLOTS,
        enable_prefix_caching=has_cache,
        disk_cache_size=0,
        itl_target_ms=0,
        disable_log_stats=True,
    )


def _seconds(engine: LLM, prompts: list[list[int]], tokens: int) -> float:
    """CPU time of all threads of this process."""
    params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
    began = time.process_time()
    engine.generate(prompts, params, use_tqdm=False)
    return time.process_time() - began

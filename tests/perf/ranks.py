"""What several ranks cost: the plan of a step on the wire, time and memory of each beside one process.

Two ranks of one machine share its cores and its memory bandwidth, so only what they add means anything.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from mlxserve import LLM, SamplingParams
from mlxserve.bench.report import Figure, Report
from mlxserve.ranks.wire import PlanDecoder, PlanEncoder
from mlxserve.request import Chunk, LiveRequest, Request, as_page_table
from mlxserve.system import machine

_PAGE_SIZE = 32
_PLANS = ((16, 32_000), (64, 8_000))  # decodes, context of each
_CHUNK = 2_048
_TOKENS, _WARM_UP = 8, 2
_ROUNDS = 200
_SPLITS: dict[str, dict[str, int]] = {"alone": {}, "by heads": {"tp": 2}, "by layers": {"pp": 2}}
_BATCHES = (1, 16)


def bench_ranks(model: Path, runs: int) -> Report:
    figures = plan_figures()
    found: dict[str, list[dict[str, float]]] = {name: [] for name in _SPLITS}
    for _ in range(runs):
        for name, sizes in _SPLITS.items():  # interleaved: other load changes within minutes
            found[name].append(_in_a_process(model, sizes))
    for name, results in found.items():
        for key in results[0]:
            unit = "MB" if "memory" in key else "ms"
            figures.append(Figure(f"{name}: {key}", unit, tuple(one[key] for one in results)))
    return Report("ranks", {"model": str(model), "runs": runs}, tuple(figures))


def plan_figures() -> list[Figure]:
    """Bytes of a plan, and microseconds to encode and to decode it."""
    figures = []
    for count, context in _PLANS:
        steps = [_decodes(count, context + at) for at in range(_ROUNDS)]
        figures += _timed(f"plan of {count} decodes at {context:,}", steps)
    request = LiveRequest(Request("0", [0] * _CHUNK * 2, SamplingParams()))
    pages = as_page_table(range(2 * _CHUNK // _PAGE_SIZE))
    chunk = [Chunk(request, _CHUNK, _CHUNK, pages, samples=True)]
    return figures + _timed(f"plan of a chunk of {_CHUNK:,}", [chunk] * _ROUNDS)


_tables: dict[int, list[Chunk]] = {}


def _decodes(count: int, context: int) -> list[Chunk]:
    if count not in _tables:
        pages = as_page_table(range(context // _PAGE_SIZE + _ROUNDS))
        _tables[count] = [
            Chunk(
                LiveRequest(Request(str(i), [0], SamplingParams()), arrival=i),
                context,
                1,
                pages,
                samples=True,
                is_lazy=True,
            )
            for i in range(count)
        ]
    return [chunk._replace(start=context) for chunk in _tables[count]]


def _timed(name: str, steps: Sequence[Sequence[Chunk]]) -> list[Figure]:
    encoder, decoder = PlanEncoder(), PlanDecoder(has_states=False)
    encoding, decoding, size = [], [], 0
    for chunks in steps:
        sources = {chunk: row for row, chunk in enumerate(chunks) if chunk.is_lazy}
        began = time.perf_counter()
        body = encoder.encode(chunks, sources)
        middle = time.perf_counter()
        decoder.decode(body)
        encoding.append((middle - began) * 1e6)
        decoding.append((time.perf_counter() - middle) * 1e6)
        size = len(body)
    return [
        Figure(f"{name}: bytes", "B", (float(size),)),
        Figure(f"{name}: encode", "us", (statistics.median(encoding),)),
        Figure(f"{name}: decode", "us", (statistics.median(decoding),)),
    ]


def _in_a_process(model: Path, sizes: dict[str, int]) -> dict[str, float]:
    """mx.distributed knows one group in the life of a process."""
    command = [sys.executable, "-m", "tests.perf.ranks", str(model), json.dumps(sizes)]
    # One thread for each rank, and for the one process that they are compared with.
    environment = {**os.environ, "MKL_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def _measure(model: str, tp: int = 1, pp: int = 1) -> dict[str, float]:
    machine.import_mlx_lm()  # before mlx, which else keeps the slow BLAS that it is linked with
    import mlx.core as mx

    found: dict[str, float] = {}
    warm_up, params = (
        SamplingParams(max_tokens=count, temperature=0, ignore_eos=True)
        for count in (_WARM_UP, _TOKENS)
    )
    with LLM(
        model,
        num_pages=2_000,
        tensor_parallel_size=tp,
        pipeline_parallel_size=pp,
        disable_log_stats=True,
    ) as llm:
        found["memory of rank 0"] = mx.get_active_memory() / 1e6
        for batch in _BATCHES:
            prompts = [[n + 3, 5, 7] for n in range(batch)]
            llm.generate(prompts, warm_up, use_tqdm=False)
            began = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            found[f"step of {batch}"] = (time.perf_counter() - began) / _TOKENS * 1e3
        for rank, size in sorted(llm.stats().ranks.memory_active.items()):
            found[f"memory of rank {rank}"] = size / 1e6
    return found


if __name__ == "__main__":
    print(json.dumps(_measure(sys.argv[1], **json.loads(sys.argv[2]))))

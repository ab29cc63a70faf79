"""Measures how long a step takes by its rows, at load: what a drafted token costs on this machine."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from itertools import accumulate, pairwise

import mlx.core as mx

from mlxserve.cache.kv import Backends, KVPool
from mlxserve.core.sampling_params import SamplingParams
from mlxserve.model.load import LoadedModel
from mlxserve.model.runner import ModelRunner
from mlxserve.request import Chunk, LiveRequest, Request, as_page_table

log = logging.getLogger("mlxserve.model.row_speeds")

# One, what follows one; the last that mlx's kernel for few rows takes in one pass of the weights,
# and in two; the first that its matrix kernel takes; two of the latter's tile.
ROWS = (1, 2, 3, 5, 8, 13, 16, 32)
_DRAFT = 3  # tokens of a draft that is computed first
_REPEATS = 3  # steps of a size, after the first one; the fastest counts
# A large model takes longer than the first of these for all sizes: from then on a size has one step after
# the first, and from the second on no larger size is measured.
HURRY_SECONDS, MAX_SECONDS = 1.0, 3.0


def measure_rows(
    loaded: LoadedModel, backends: Backends, page_size: int, rows: Sequence[int] = ROWS
) -> dict[int, float]:
    """Return the seconds of a step by its rows, ascending; never less with more rows.

    The rows are decodes of as many sequences, at their first position: a draft's rows cost as
    much, apart from the pages, which on Metal some of them read together.
    """
    began = time.perf_counter()
    kv = KVPool(loaded.layers, max(*rows, 1 + _DRAFT), page_size, backends)
    runner = ModelRunner(loaded, kv)
    params = SamplingParams(temperature=0)
    chunks = [
        Chunk(
            LiveRequest(Request(f"row {row}", [0], params)),
            0,
            1,
            as_page_table([row]),
            samples=True,
        )
        for row in range(max(rows))
    ]
    _compute_a_draft(runner, chunks[0], page_size)
    measured = []
    for num_rows in rows:
        is_late = time.perf_counter() - began > HURRY_SECONDS
        measured.append(_seconds(runner, chunks[:num_rows], 1 if is_late else _REPEATS))
        if time.perf_counter() - began > MAX_SECONDS:
            break
    del kv, runner
    mx.synchronize()
    mx.clear_cache()
    table = dict(zip(rows, accumulate(measured, max), strict=False))
    log.info("Steps of %s", describe(table))
    return table


def _compute_a_draft(runner: ModelRunner, chunk: Chunk, page_size: int) -> None:
    """Compute a step with a draft, so that no answer waits for the kernels that only drafts need to be compiled."""
    draft = (0,) * _DRAFT
    table = as_page_table(range(-(-(1 + _DRAFT) // page_size)))
    pending = runner.launch([chunk._replace(length=1 + _DRAFT, page_table=table, draft=draft)])
    runner.start(pending)
    runner.collect(pending)


def describe(table: dict[int, float]) -> str:
    """Describe a table: `1, 2, 3 rows take 20.1, 21.0, 22.5 ms`."""
    rows = ", ".join(str(num_rows) for num_rows in table)
    times = ", ".join(f"{1e3 * seconds:.1f}" for seconds in table.values())
    return f"{rows} rows take {times} ms"


def _seconds(runner: ModelRunner, chunks: Sequence[Chunk], repeats: int) -> float:
    """Seconds from one step to the next one, which is launched before the first is read, as in the engine."""
    pending, times = runner.launch(chunks), []
    for _ in range(repeats + 1):
        following = runner.launch(chunks)
        runner.start(pending)
        runner.collect(pending)
        times.append(time.perf_counter())
        pending = following
    runner.start(pending)
    runner.collect(pending)
    return min(after - before for before, after in pairwise(times))

"""Measures how long a step takes by its rows, at load: what a drafted token costs on this machine."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
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
_DRAFT = 3  # tokens of a draft, which is computed first: no answer waits for the kernels that only drafts need
_REPEATS = 3  # steps of a size, after the first one; the fastest counts
_NUM_STEPS = _REPEATS + 3
# A step leaves new ones, and one is launched while another runs.
_STATES_OF_A_ROW = 3
# A large model takes longer than the first of these for all sizes: from then on a size has one step after
# the first, and from the second on no larger size is measured.
HURRY_SECONDS, MAX_SECONDS = 1.0, 3.0


def measure_rows(
    loaded: LoadedModel,
    backends: Backends,
    page_size: int,
    rows: Sequence[int] = ROWS,
    num_slots: int | None = None,
) -> tuple[dict[int, float], float]:
    """Return (seconds of a step by its rows, ascending; those that each token of its longest draft adds).

    The rows are decodes of as many sequences, at their first positions. A draft's rows cost as much, apart from
    the pages, which on Metal some of them read together. With more rows a step never takes less.

    In layers with recurrent states the second rows of all drafts are a call after that of the first rows, the third
    rows another one, and so on: a draft of one sequence shows what such a call adds, which is 0 for other models.

    num_slots: recurrent states that there is memory for; None for as many as the rows need
    """
    began = time.perf_counter()
    longest = _DRAFT
    if loaded.has_states and num_slots is not None:
        rows = [each for each in rows if each == 1 or each <= num_slots // _STATES_OF_A_ROW]
        longest = max(1, min(_DRAFT, num_slots // _STATES_OF_A_ROW - 1))
    num_tokens = _NUM_STEPS * (1 + longest)
    pages = -(-num_tokens // page_size)
    kv = KVPool(loaded.layers, max(*rows, 1 + longest) * pages, page_size, backends)
    runner = ModelRunner(loaded, kv)

    def steps(num_rows: int, length: int) -> Iterator[Sequence[Chunk]]:
        """Yield the steps of new sequences, one after the other: a first row of each, and then this many."""
        return _steps(num_rows, length, num_tokens, pages, advances=loaded.has_states)

    # The first step of states follows those of single sequences, which are put together.
    extra = 1 if loaded.has_states else 0
    drafted = _seconds(runner, steps(1, 1 + longest), 1 + extra)
    measured = []
    for num_rows in rows:
        is_late = time.perf_counter() - began > HURRY_SECONDS
        measured.append(_seconds(runner, steps(num_rows, 1), (1 if is_late else _REPEATS) + extra))
        if time.perf_counter() - began > MAX_SECONDS:
            break
    call = 0.0
    if loaded.has_states:
        side_by_side = _seconds(runner, steps(1 + longest, 1), 1 + extra)
        call = max(0.0, drafted - side_by_side) / longest
        log.info("Each token of the longest draft adds %.1f ms of recurrent layers", 1e3 * call)
    del kv, runner
    mx.synchronize()
    mx.clear_cache()
    table = dict(zip(rows, accumulate(measured, max), strict=False))
    log.info("Steps of %s", describe(table))
    return table, call


def seconds_of_draft(loaded: LoadedModel, backends: Backends, page_size: int) -> float:
    """Return the seconds of a step with one draft, of a model with recurrent states."""
    num_tokens = (_REPEATS + 3) * (1 + _DRAFT)
    pages = -(-num_tokens // page_size)
    runner = ModelRunner(loaded, KVPool(loaded.layers, pages, page_size, backends))
    return _seconds(runner, _steps(1, 1 + _DRAFT, num_tokens, pages, advances=True), _REPEATS)


def describe(table: dict[int, float]) -> str:
    """Describe a table: `1, 2, 3 rows take 20.1, 21.0, 22.5 ms`."""
    rows = ", ".join(str(num_rows) for num_rows in table)
    times = ", ".join(f"{1e3 * seconds:.1f}" for seconds in table.values())
    return f"{rows} rows take {times} ms"


def _steps(
    num_rows: int, length: int, num_tokens: int, pages: int, *, advances: bool
) -> Iterator[Sequence[Chunk]]:
    """Yield steps of sequences that begin: the first row of each alone, then `length` rows of each, drafted but one.

    advances: whether each step is at the positions after the one before, as states want it
    """
    params, draft = SamplingParams(temperature=0), (0,) * (length - 1)
    chunks = [
        Chunk(
            LiveRequest(Request(f"row {row}", [0] * num_tokens, params)),
            0,
            1,
            as_page_table(range(row * pages, (row + 1) * pages)),
            samples=True,
        )
        for row in range(num_rows)
    ]
    yield chunks
    start = 1
    while True:
        yield [chunk._replace(start=start, length=length, draft=draft) for chunk in chunks]
        start += length if advances else 0


def _seconds(runner: ModelRunner, steps: Iterator[Sequence[Chunk]], repeats: int) -> float:
    """Seconds from one step to the next one, which is launched before the first is read, as in the engine."""
    pending, times = runner.launch(next(steps)), []
    for _ in range(repeats + 1):
        following = runner.launch(next(steps))
        runner.start(pending)
        runner.collect(pending)
        times.append(time.perf_counter())
        pending = following
    runner.start(pending)
    runner.collect(pending)
    return min(after - before for before, after in pairwise(times))

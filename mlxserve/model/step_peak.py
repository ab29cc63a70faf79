"""Measures the peak memory of a step, next to weights and pool, at load.

A step with the most rows runs, or on a CPU part of one. `sizing` plans the remaining pages.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import mlx.core as mx

from metal_kernels.limits import SHARE_COPIED, room_for
from metal_kernels.long_chunks import copying, counted_positions, longest_copied
from mlxserve.cache.kinds.state_slots import StateSlots
from mlxserve.cache.kv import Backends, KVPool, LayerSpec
from mlxserve.core.config import EngineConfig
from mlxserve.core.sampling_params import SamplingParams
from mlxserve.core.step_rows import layers_under_way
from mlxserve.model.batch import Batch
from mlxserve.model.load import LoadedModel
from mlxserve.model.runner import ModelRunner
from mlxserve.model.step_graphs import TIMES_BEFORE
from mlxserve.model.window_group import WindowGroup
from mlxserve.request import Chunk, LiveRequest, Request, StatePlan, as_page_table
from mlxserve.system import machine
from mlxserve.system.device_memory import beside_cache

log = logging.getLogger("mlxserve.sizing")

# Rows of the measured forward on a CPU, where all 2,048 would cost seconds of start-up. A step's
# temporaries grow with its rows, so the peak of a full step is extrapolated.
_MEASURED_ROWS = 256
# On Metal the peak is not proportional to the rows: MLX's command buffers keep what they read until
# they complete, up to a limit (machine.py). Extrapolating 256 rows of an 8B model gives 2.0 times the
# peak of 2,048. So all rows are measured, up to these.
_MAX_MEASURED_ROWS = 2048
# Of the measured peak. Where a command buffer ends depends on the shapes before it, so that a smaller
# step or one with longer contexts may need more than the measured one: up to 1.05 times its peak at
# 512 rows and 1.23 at 2,048, in replays of MLX's rules for four models and four sizes of machine.
_MARGIN = 1.25
# Positions that the measured chunk sees at most: with 128 Ki the step would take tens of seconds. What the
# copies of more take is known.
_MAX_MEASURED_POSITIONS = 8192


@dataclass(frozen=True, slots=True)
class StepPeak:
    """Bytes that a step of `num_rows` needs next to weights and pool.

    measured: of the step that ran, with `num_measured` rows
    seconds: duration of that step
    start: positions before those rows, which they see
    unkept: bytes of the limit in which MLX keeps no freed arrays
    """

    planned: int
    measured: int
    num_rows: int
    num_measured: int
    seconds: float
    start: int = 0
    unkept: int = 0

    @property
    def beside_cache(self) -> int:
        """Bytes that weights and pool leave free for the step."""
        return beside_cache(self.planned, self.unkept)


def measure_step(
    config: EngineConfig,
    loaded: LoadedModel,
    backends: Backends,
    *,
    is_metal: bool,
    memory_limit: int,
    group: WindowGroup | None = None,
    unkept: int = 0,
) -> StepPeak:
    """Run a step of `max_num_batched_tokens` rows, or on a CPU part of it, for its peak memory.

    The memory that images need is planned as well.

    memory_limit: bytes to plan with, which bound the positions that a chunk can see
    group: sliding-window layers, if they may have a pool of their own
    unkept: as in MemoryLimit
    """
    num_rows, start = config.scheduler.step_budget, 0
    if is_metal:
        step = measured_rows(num_rows, config.scheduler.max_num_seqs)
        rows, measured = sum(step), 0
        longest = min(
            config.scheduler.max_model_len or loaded.max_length,
            loaded.context.longest,
            _max_positions(loaded, memory_limit, group),
        )
        seen = copied_positions(loaded.layers, step[1], min(longest, _MAX_MEASURED_POSITIONS))
        # The same forwards on every rank.
        if loaded.group is not None:
            seen = [loaded.all_max(max(seen))]
        for positions in seen:
            start = (positions - step[1]) // config.page_size * config.page_size
            peak, seconds = _run_sampling(loaded, backends, config.page_size, step, start)
            measured = max(measured, peak)
        measured = peak_with_copies(
            measured, loaded.layers, rows, max(seen), longest, machine.total_memory()
        )
        planned = planned_peak(measured, rows, num_rows)
    else:
        rows = min(_MEASURED_ROWS, num_rows)
        measured, seconds = _run_chunk(loaded, backends, config.page_size, rows)
        # The measured chunk made one new state; each decode makes another.
        planned = measured * num_rows // rows
        planned += config.scheduler.max_num_seqs * loaded.state_nbytes
    # The tower may begin while a step is under way.
    if loaded.vision is not None:
        planned += loaded.vision.planned_nbytes(num_rows)
    log.info(
        "Step of %d tokens: %.2f GiB planned, %.2f GiB measured with %d tokens in %.2f s",
        num_rows,
        planned / (1 << 30),
        measured / (1 << 30),
        rows,
        seconds,
    )
    return StepPeak(planned, measured, num_rows, rows, seconds, start, unkept)


def peak_with_copies(
    measured: int, layers: Sequence[LayerSpec], rows: int, seen: int, longest: int, memory: int
) -> int:
    """Peak of a step whose chunk has the most positions copied for MLX's attention.

    Extrapolated from a step that saw `seen` positions: fewer layers are under way, each with larger
    copies, and with the scores of unfused attention.

    rows: of the chunk. longest: positions of a sequence. memory: of the machine, in bytes
    """
    seen = room_for(seen)
    rooms = [_room_of(spec, rows, longest, memory) for spec in layers]
    if max(rooms, default=0) <= seen:
        return measured
    nbytes = max(map(partial(_bytes_of, rows=rows, memory=memory), layers, rooms))
    before, after = (
        layers_under_way(
            rows,
            max(
                counted_positions(rows, min(room, most), spec.key_dim, spec.dtype)
                for spec, room in zip(layers, rooms, strict=True)
            ),
            memory,
        )
        for most in (seen, max(rooms))
    )
    return max(measured, measured * after // before + after * nbytes)


def _room_of(spec: LayerSpec, rows: int, longest: int, memory: int) -> int:
    """Positions that a layer's copies have room for at most; 0 if none are made."""
    max_copied = longest_copied(rows, spec.kv_heads, spec.key_dim, spec.dtype, memory)
    positions = min(max_copied, longest, (spec.window or longest) + rows)
    return room_for(positions) if max_copied else 0


def _bytes_of(spec: LayerSpec, room: int, *, rows: int, memory: int) -> int:
    """Bytes of a layer's copies and scores.

    Where there is room for less than the longest sequence, fewer rows have copies of more positions
    instead of scores: all that layers may take.
    """
    each = spec.kv_heads * (spec.key_dim + spec.value_dim) * spec.dtype.size
    how = copying(spec.key_dim, spec.dtype)
    scores = 0 if how is None or not room else how.score_bytes(rows, spec.dtype)
    if scores and room == longest_copied(rows, spec.kv_heads, spec.key_dim, spec.dtype, memory):
        return memory // SHARE_COPIED
    return room * (each + scores)


def _max_positions(loaded: LoadedModel, memory_limit: int, group: WindowGroup | None) -> int:
    """Positions of a sequence that has all memory besides the weights."""
    each = sum(spec.bytes_per_token() for spec in loaded.layers) + loaded.draft_bytes_per_token
    if group is not None:
        each = group.other_page_bytes // group.page_size
    return max(1, (memory_limit - loaded.weight_size) // each) if each else loaded.max_length


def measured_rows(num_rows: int, max_num_seqs: int) -> tuple[int, int]:
    """(decodes, rows of one chunk) of the step that is measured on Metal.

    As many of each as a step of `num_rows` may have, since the sampler's memory follows the
    decodes.
    """
    rows = min(num_rows, _MAX_MEASURED_ROWS)
    num_decodes = min(max_num_seqs, rows) - 1
    return num_decodes, rows - num_decodes


def copied_positions(layers: Sequence[LayerSpec], rows: int, longest: int) -> list[int]:
    """Positions at which some layer's copies for MLX's attention are largest, ascending.

    They are what a chunk of `rows` sees, at most `longest`; those of its own rows if no layer
    copies.
    """
    limits = {longest_copied(rows, spec.kv_heads, spec.key_dim, spec.dtype) for spec in layers}
    return sorted({max(rows, min(positions, longest)) for positions in limits}) or [rows]


def planned_peak(measured: int, num_measured: int, num_rows: int) -> int:
    """Bytes to plan for a step of `num_rows` on Metal, from a measurement of `num_measured`."""
    return int(measured * num_rows // num_measured * _MARGIN)


def _run_sampling(
    loaded: LoadedModel, backends: Backends, page_size: int, rows: tuple[int, int], start: int
) -> tuple[int, float]:
    """(peak, seconds): the larger peak of two runs, and the second one's time.

    The first waits for kernels to be compiled, and meanwhile the device completes command buffers.
    Copies a page and writes one as the disk cache does, too, and has the step of a decode recorded,
    so that no kernel is compiled in an answer: the recorded graph fuses other operations than the
    built one.

    start: of the chunk, whose rows see that many positions more: all on one page, over and over,
        because only the numbers would be others
    """
    params = SamplingParams(temperature=1.0, top_p=0.9)
    num_decodes, length = rows
    num_pages = num_decodes + -(-length // page_size) + 1  # one to copy to
    kv = KVPool(loaded.layers, num_pages, page_size, backends)
    runner = ModelRunner(loaded, kv)
    pages = [as_page_table([page]) for page in range(num_decodes)]
    seen = [0] * (start // page_size)
    pages.append(as_page_table([*seen, *range(num_decodes, num_pages - 1)]))
    spans = [(0, 1, None)] * num_decodes + [(start, length, _state_before(start, loaded, runner))]
    chunks = [
        Chunk(_live(first + n, params), first, n, pages[i], samples=True, state=state)
        for i, (first, n, state) in enumerate(spans)
    ]
    peaks = []
    for _ in range(2):
        before, began = _reset_peak(), time.perf_counter()
        pending = runner.launch(chunks)
        runner.start(pending)
        runner.collect(pending)
        seconds = time.perf_counter() - began
        peaks.append(max(0, mx.get_peak_memory() - before))
        del pending
    # The first step that continues from a state uploads more.
    num_steps = TIMES_BEFORE + 2 + int(loaded.has_states)
    request = _live(num_steps, params)
    for position in range(num_steps):
        pending = runner.launch([Chunk(request, position, 1, pages[0], samples=True)])
        runner.start(pending)
        runner.collect(pending)
    kv.copy_pages([0], [num_pages - 1])
    kv.write_units([0], kv.read_units([0]))
    del kv, runner
    _return_memory()
    return max(peaks), seconds


def _live(num_tokens: int, params: SamplingParams) -> LiveRequest:
    return LiveRequest(Request("sizing", [0] * num_tokens, params))


def _state_before(start: int, loaded: LoadedModel, runner: ModelRunner) -> StatePlan | None:
    """Snapshot of zeros for a chunk that begins at `start`; None without recurrent states."""
    if not start or not loaded.has_states:
        return None
    runner.write(StateSlots.name, [0], [bytes(loaded.state_nbytes)])
    return StatePlan(restore=0, keeps=())


def _run_chunk(
    loaded: LoadedModel, backends: Backends, page_size: int, rows: int
) -> tuple[int, float]:
    """(peak, seconds)."""
    pages = as_page_table(range(-(-rows // page_size)))
    kv = KVPool(loaded.layers, len(pages), page_size, backends)
    runner = ModelRunner(loaded, kv)
    request = _live(rows, SamplingParams(temperature=0))
    batch = Batch.from_chunks([Chunk(request, 0, rows, pages, samples=True)], page_size)
    before, began = _reset_peak(), time.perf_counter()
    mx.eval(runner.logits(batch, mx.array(batch.tokens)))
    seconds = time.perf_counter() - began
    peak = max(0, mx.get_peak_memory() - before)
    del kv, runner
    _return_memory()
    return peak, seconds


def _reset_peak() -> int:
    """Reset the peak, and return the bytes in use now."""
    mx.reset_peak_memory()
    return int(mx.get_active_memory())


def _return_memory() -> None:
    mx.synchronize()
    mx.clear_cache()

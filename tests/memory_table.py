"""Planned and replayed memory of real models on real Macs, and the table of docs/tuning.md.

GPU working sets are those that macOS reports by default: two thirds of the memory below 36 GB,
three quarters from there on. Steps are replayed by MLX's rules (`command_buffers.py`) for models'
sizes (`geometries.py`), or for the table estimated as `mlxserve models` does; nothing here was
measured on a Mac.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import mlx.core as mx

from metal_kernels.first_page import first_page
from metal_kernels.limits import room_for
from metal_kernels.long_chunks import longest_copied
from mlxserve.cache.kv import LayerSpec
from mlxserve.core.config import SchedulerConfig
from mlxserve.core.step_rows import rows_under_way
from mlxserve.hub.catalog import MemoryFit, memory_fit, well_known
from mlxserve.model.step_peak import measured_rows, peak_with_copies, planned_peak
from mlxserve.system.device_memory import DeviceMemory, beside_cache
from mlxserve.system.machine import COMMAND_BUFFER_LIMITS
from tests.command_buffers import Limits, Replay, replay
from tests.geometries import Geometry, StepShape, operations

# Today's Macs, in GB, and models that people run on them.
TABLE: Final = (
    (8, "LFM2.5-2.6B-MLX-4bit"),
    (8, "gemma-4-e2b-it-4bit"),
    (16, "Qwen3.5-4B-MLX-4bit"),
    (16, "Qwen3.5-9B-MLX-4bit"),
    (16, "gemma-4-12B-it-4bit"),
    (24, "Ternary-Bonsai-27B-mlx-2bit"),
    (24, "gpt-oss-20b-MXFP4-Q8"),
    (32, "Qwen3.8-27B-MLX-4bit"),
    (32, "Qwen3.6-35B-A3B-4bit"),
    (32, "gemma-4-31b-it-4bit"),
    (36, "Qwen3-32B-4bit"),
    (48, "gemma-4-31b-it-4bit"),
    (64, "Qwen3-Coder-Next-4bit"),
    (128, "gpt-oss-120b-MXFP4-Q8"),
)
_UTILIZATION_BEFORE: Final = 0.9
_NUM_SEQS: Final = 64
_PAGE_SIZE: Final = 32
_MAX_MEASURED: Final = 8192  # positions that the measured chunk sees


def working_set(memory: int) -> int:
    """Of a Mac with `memory` GB, in bytes."""
    return (memory << 30) * (2 if memory < 36 else 3) // (3 if memory < 36 else 4)


def mac(memory: int) -> DeviceMemory:
    """A Mac with `memory` GB whose other programs have wired no more than macOS leaves them."""
    return DeviceMemory(memory << 30, working_set(memory), is_metal=True)


@dataclass(frozen=True, slots=True)
class Plan:
    """Bytes, and tokens of the cache; `pool` 0 where the server does not start."""

    step: int
    pool: int
    num_tokens: int

    @property
    def starts(self) -> bool:
        return self.pool > 0


def replayed(model: Geometry, memory: int, step: StepShape, pool_tokens: int) -> Replay:
    """A step on a machine of `memory` GB with today's limits, over a cache of `pool_tokens`."""
    return replay(operations(model, step, bound_tokens(pool_tokens)), limits_of(memory))


def bound_tokens(pool_tokens: int) -> int:
    """Tokens of the part of a cache that a kernel binds."""
    pages = -(-pool_tokens // _PAGE_SIZE)
    return first_page(mx.broadcast_to(mx.zeros(()), (pages, 1, _PAGE_SIZE, 1))).size


def limits_of(memory: int) -> Limits:
    chosen = COMMAND_BUFFER_LIMITS
    return Limits(
        chosen["MLX_MAX_OPS_PER_BUFFER"],
        chosen["MLX_MAX_MB_PER_BUFFER"],
        rows_under_way(memory << 30),
    )


def plan_after(model: Geometry, memory: int, num_rows: int = 512) -> Plan:
    """What the server plans: all rows of a step are measured, up to a limit."""
    num_decodes, length = measured_rows(num_rows, _NUM_SEQS)
    rows = num_decodes + length
    copied = min(most_copied(model, length, memory), _MAX_MEASURED)
    shape = StepShape(rows, num_decodes, 1, num_decodes + 1, copied)
    measured = replayed(model, memory, shape, rows * _PAGE_SIZE).peak
    spec = LayerSpec(model.kv_heads, model.head_dim, model.head_dim, mx.bfloat16)
    longest = max_positions(model, memory)
    seen = max(copied, length)
    largest = peak_with_copies(measured, [spec], rows, seen, longest, memory << 30)
    return _fitted(model, memory, planned_peak(largest, rows, num_rows))


def most_copied(model: Geometry, rows: int, memory: int) -> int:
    """Positions that a chunk of these rows has copied at most, 0 where it reads the pages."""
    longest = longest_copied(rows, model.kv_heads, model.head_dim, mx.bfloat16, memory << 30)
    return room_for(min(longest, max_positions(model, memory)))


def max_positions(model: Geometry, memory: int) -> int:
    """Of a sequence that has all memory beside the weights."""
    left = max(0, working_set(memory) - model.weight_size)
    return min(model.max_length, left // model.bytes_per_token)


def _fitted(model: Geometry, memory: int, step: int) -> Plan:
    limit = mac(memory).limit()
    left = limit.nbytes - model.weight_size - beside_cache(step, limit.unkept)
    page = _PAGE_SIZE * model.bytes_per_token
    num_pages = min(left // page, _NUM_SEQS * model.max_length // _PAGE_SIZE)
    if num_pages < 2:
        return Plan(step, 0, 0)
    return Plan(step, num_pages * page, num_pages * _PAGE_SIZE)


def memory_table() -> str:
    """Models on Macs as `mlxserve models` counts there, before and after, in Markdown."""
    known = {entry.name.rpartition("/")[2]: entry for entry in well_known()}
    lines = [
        "| Mac | For models | Model | Weights | Step | Tokens before | Tokens | Made for |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for memory, name in TABLE:
        entry, after = known[name], mac(memory).limit()
        before = mac(memory).limit(_UTILIZATION_BEFORE)
        step = entry.step_size(after, SchedulerConfig(), is_metal=True, in_8_bits=False)
        cells = (
            f"{memory} GB",
            f"{after.nbytes / (1 << 30):.1f} GiB",
            name,
            f"{entry.weight_size / 1e9:.1f} GB",
            f"{step / 1e9:.1f} GB",
            _tokens(memory_fit(entry, memory=before, is_metal=True)),
            _tokens(memory_fit(entry, memory=after, is_metal=True)),
            f"{entry.context:,}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _tokens(fit: MemoryFit) -> str:
    if not fit.num_tokens:
        return "does not start"
    tokens = f"{min(fit.num_tokens, fit.context):,}"
    if fit.num_windows is None:
        return tokens
    return f"{tokens} or {fit.num_windows} window{'s' * (fit.num_windows > 1)}"

"""Planned and replayed memory of real models on real Macs: the table of docs/tuning.md.

GPU working sets are those that macOS reports by default: two thirds of the memory below 36 GB,
three quarters from there on. The numbers follow from MLX's rules (`command_buffers.py`) and the
models' sizes (`geometries.py`); nothing here was measured on a Mac.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import mlx.core as mx

from metal_kernels.first_page import first_page
from metal_kernels.limits import room_for
from metal_kernels.long_chunks import longest_copied
from mlxserve.cache.kv import LayerSpec
from mlxserve.core.step_rows import rows_under_way
from mlxserve.model.step_peak import measured_rows, peak_with_copies, planned_peak
from mlxserve.system.machine import COMMAND_BUFFER_LIMITS
from tests.command_buffers import Limits, Replay, peak, replay
from tests.geometries import GEOMETRIES, Geometry, StepShape, operations

MACHINES: Final = (("M1", 8), ("M2", 16), ("M4 Pro", 48), ("M3 Ultra", 512))
_UTILIZATION: Final = 0.9
_NUM_SEQS: Final = 64
_PAGE_SIZE: Final = 32
_MAX_MEASURED: Final = 8192  # positions that the measured chunk sees


def working_set(memory: int) -> int:
    """Of a Mac with `memory` GB, in bytes."""
    return (memory << 30) * (2 if memory < 36 else 3) // (3 if memory < 36 else 4)


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


def plan_before(model: Geometry, memory: int) -> Plan:
    """What it planned: 256 rows at 400 million elements per command buffer, times 8."""
    measured = peak(operations(model, StepShape(256), 256), Limits(200, 400))
    return _fitted(model, memory, measured * 8)


def _fitted(model: Geometry, memory: int, step: int) -> Plan:
    left = int(working_set(memory) * _UTILIZATION) - model.weight_size - step
    page = _PAGE_SIZE * model.bytes_per_token
    num_pages = min(left // page, _NUM_SEQS * model.max_length // _PAGE_SIZE)
    if num_pages < 2:
        return Plan(step, 0, 0)
    return Plan(step, num_pages * page, num_pages * _PAGE_SIZE)


def memory_table() -> str:
    """Every model on every machine, before and after, in Markdown."""
    lines = [
        "| Mac | Model (4-bit) | Step before | Cache before | Step | Cache | Context |",
        "|---|---|---|---|---|---|---|",
    ]
    for chip, memory in MACHINES:
        for model in GEOMETRIES:
            before, after = plan_before(model, memory), plan_after(model, memory)
            cells = (
                f"{chip}, {memory} GB",
                model.name,
                _gb(before.step),
                _cache(before),
                _gb(after.step),
                _cache(after),
                f"{min(after.num_tokens, model.max_length):,} tokens" if after.starts else "",
            )
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cache(plan: Plan) -> str:
    return f"{_gb(plan.pool)}, {plan.num_tokens:,} tokens" if plan.starts else "does not start"


def _gb(size: int) -> str:
    return f"{size / 1e9:.1f} GB"

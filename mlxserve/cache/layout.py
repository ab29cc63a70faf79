"""StepLayout: where the rows of one step live in the pool.

rows   | decodes: one row per sequence | chunks: the rows of each sequence, one after another |
         0 .............. num_decodes    num_decodes ................................... T
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from metal_kernels import SequenceTables
from metal_kernels.ops import Slots


@dataclass(frozen=True, slots=True)
class StepLayout:
    """One step's rows. Decodes and chunks are two dispatches over disjoint ranges of rows."""

    positions: mx.array  # (T,) int32, of each row in its sequence
    slots: Slots  # (T,) int32, where each row's KV is written
    num_decodes: int
    decodes: SequenceTables | None  # None where the step has no such rows
    chunks: SequenceTables | None

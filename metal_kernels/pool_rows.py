"""Writes and reads rows of a pool that is one array per side.

Rows are read as views of runs of slots, or as copies. A pool is (kv_heads, slots, width).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from metal_kernels.ops import Slots
from metal_kernels.quantised import loaded
from metal_kernels.tables import IntArray, SequenceTables

# Rows of a run of consecutive slots, on average, from which on a write for each run is faster than one for all
# rows, which takes some nanoseconds for each number where a run takes 5 microseconds. Keys and values of 4 heads
# of 64 dimensions, 2-core x86: 16 single rows 0.04 instead of 0.23 ms, 4 0.02 and 0.07.
_LONG_RUN = 4


@dataclass(frozen=True, slots=True)
class RowWrites:
    """The target slots of a step's rows: the same for all layers."""

    runs: tuple[tuple[int, int, int], ...]  # first row, row after the last, first slot
    together: mx.array | None  # (1, rows, 1): the slots, if all rows are written in one operation

    @classmethod
    def of(cls, slots: Slots) -> RowWrites:
        breaks = (np.flatnonzero(np.diff(slots) != 1) + 1).tolist()
        bounds = [0, *breaks, len(slots)]
        runs = [(begin, end, int(slots[begin])) for begin, end in pairwise(bounds) if end > begin]
        are_short = len(runs) > 1 and len(slots) < _LONG_RUN * len(runs)
        return cls(tuple(runs), mx.array(slots)[None, :, None] if are_short else None)

    def write(self, pool: mx.array, rows: mx.array) -> None:
        """Write `rows`, (rows, kv_heads, width), in the pool's own dtype."""
        if self.together is not None:
            heads = rows.swapaxes(0, 1)
            index = mx.broadcast_to(self.together, heads.shape)
            # Not another array: while the caller kept the old one as well, mlx would copy the pool.
            pool[...] = mx.put_along_axis(pool, index, heads, axis=1)
            return
        for first, end, slot in self.runs:
            pool[:, slot : slot + end - first] = rows[first:end].swapaxes(0, 1)


class Runs:
    """Slots of consecutive positions of a sequence: (first slot, slot after the last) of each run.

    Kept with the tables of a step (`SequenceTables.plan`), because all layers read the same slots.
    """

    def __init__(self, bounds: Sequence[tuple[int, int]]) -> None:
        self.bounds = tuple(bounds)
        # Indices for `take_rows`, by a pool's shape.
        self._indices: dict[tuple[int, ...], mx.array] = {}

    def __len__(self) -> int:
        return len(self.bounds)

    def read(self, pool: mx.array, dtype: mx.Dtype) -> mx.array:
        """Return (1, kv_heads, positions, head_dim): a view of a single run, else a copy.

        Of a quantised pool it is a copy in `dtype`. Rows are copied one by one: joining the runs
        takes as long where they are long, and with 90 runs of 32 positions 2.4 times as long.
        """
        if len(self.bounds) == 1:
            return self.read_each(pool, dtype)[0][None]
        key = pool.shape[:2]
        if key not in self._indices:
            slots = np.concatenate([np.arange(*bounds, dtype=np.int32) for bounds in self.bounds])
            self._indices[key] = row_index(slots, pool)
        return take_rows(pool, self._indices[key], dtype)[None]

    def read_each(self, pool: mx.array, dtype: mx.Dtype) -> list[mx.array]:
        """Return each run alone, (kv_heads, positions, head_dim)."""
        return [loaded(pool[:, start:end], dtype) for start, end in self.bounds]


def row_index(slots: IntArray, pool: mx.array) -> mx.array:
    """Return the index for `take_rows` of pools of this shape: (kv_heads, *slots.shape)."""
    kv_heads, num_slots, _ = pool.shape
    first = np.arange(kv_heads).reshape(-1, *[1] * slots.ndim) * num_slots
    return mx.array(first + slots)


def take_rows(pool: mx.array, index: mx.array, dtype: mx.Dtype) -> mx.array:
    """Copy rows: (*index.shape, head_dim); of a quantised pool in `dtype`.

    `pool[:, slots]` indexes heads and slots apart, in three more operations, and takes a fifth to a
    third longer.
    """
    kv_heads, num_slots, width = pool.shape
    return loaded(mx.take(pool.reshape(kv_heads * num_slots, width), index, axis=0), dtype)


def padded_slots(
    tables: SequenceTables, rows: Sequence[int], firsts: npt.NDArray[np.integer]
) -> tuple[IntArray, npt.NDArray[np.float32]]:
    """Slots of these sequences' positions from `firsts` on, and a mask of padding.

    Both are (sequences, positions); the mask is 0, and minus infinity past a sequence's end. There
    it has its first slot, which holds a number.
    """
    contexts, page_tables = tables.context_lens[rows], tables.page_tables[rows]
    position = firsts[:, None] + np.arange((contexts - firsts).max())
    is_seen = position < contexts[:, None]
    position = np.where(is_seen, position, firsts[:, None])
    pages = np.take_along_axis(page_tables, position // tables.page_size, axis=1)
    slots: IntArray = pages * tables.page_size + position % tables.page_size
    return slots.astype(np.int32), np.where(is_seen, np.float32(0), np.float32(-np.inf))

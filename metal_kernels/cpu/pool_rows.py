"""Rows of a pool: written to slots, and read as views of runs of slots or as copies of any slots."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from metal_kernels.ops import Slots
from metal_kernels.quantised import loaded
from metal_kernels.tables import IntArray, SequenceTables

# Runs of fewer consecutive slots are written in one operation, where there are as many of them: it takes some
# nanoseconds for each number, where an operation for each run takes 5 microseconds and copies faster. Keys and
# values of 4 heads of 64 dimensions, 2-core x86: 16 single rows 0.04 instead of 0.23 ms, 4 0.02 and 0.07; of 32
# heads of 128, 16 rows 0.42 and 0.70, 4 0.17 and 0.18.
_SHORT_RUN = 4
_MANY_RUNS = 4


def write_rows(pools: Sequence[mx.array], rows: Sequence[mx.array], slots: Slots) -> None:
    """Write to these slots of each pool its rows, (rows, kv_heads, width) in the pool's own dtype."""
    runs = _consecutive(slots)
    short = [run for run in runs if run[1] - run[0] < _SHORT_RUN]
    if len(short) < _MANY_RUNS:
        short = []
    for first, end, slot in runs:
        if not short or end - first >= _SHORT_RUN:
            for pool, new in zip(pools, rows, strict=True):
                pool[:, slot : slot + end - first] = new[first:end].swapaxes(0, 1)
    if short:
        _write_together(pools, rows, slots, [row for run in short for row in range(*run[:2])])


def _write_together(
    pools: Sequence[mx.array], rows: Sequence[mx.array], slots: Slots, at: list[int]
) -> None:
    """Write the rows with these numbers in one operation for each pool."""
    where = mx.array(slots[at])[None, :, None]
    for pool, new in zip(pools, rows, strict=True):
        some = (new if len(at) == len(slots) else new[mx.array(at)]).swapaxes(0, 1)
        index = mx.broadcast_to(where, some.shape)
        # Not another array: while the caller kept the old one as well, mlx would copy the pool.
        pool[...] = mx.put_along_axis(pool, index, some, axis=1)


def _consecutive(slots: Slots) -> list[tuple[int, int, int]]:
    """(first row, row after the last, first slot) of each run of rows with consecutive slots."""
    breaks = (np.flatnonzero(np.diff(slots) != 1) + 1).tolist()
    bounds = [0, *breaks, len(slots)]
    return [(begin, end, int(slots[begin])) for begin, end in pairwise(bounds) if end > begin]


class Runs:
    """The slots of some positions of a sequence, in order: (first slot, slot after the last) of each run.

    Kept with the tables of a step (`SequenceTables.plan`), because all layers read the same slots.
    """

    def __init__(self, bounds: Sequence[tuple[int, int]]) -> None:
        self.bounds = tuple(bounds)
        self._indices: dict[tuple[int, ...], mx.array] = {}  # for `take_rows`, by a pool's shape

    def __len__(self) -> int:
        return len(self.bounds)

    def read(self, pool: mx.array, dtype: mx.Dtype) -> mx.array:
        """(1, kv_heads, positions, head_dim): a view where there is one run, or else a copy.

        Of a quantised pool a copy in `dtype`. Rows are copied one by one: joining the runs takes as
        long where they are long, and with 90 runs of 32 positions 2.4 times as long.
        """
        if len(self.bounds) == 1:
            return self.read_each(pool, dtype)[0][None]
        key = pool.shape[:2]
        if key not in self._indices:
            slots = np.concatenate([np.arange(*bounds, dtype=np.int32) for bounds in self.bounds])
            self._indices[key] = row_index(slots, pool)
        return take_rows(pool, self._indices[key], dtype)[None]

    def read_each(self, pool: mx.array, dtype: mx.Dtype) -> list[mx.array]:
        """Each run alone, (kv_heads, positions, head_dim)."""
        return [loaded(pool[:, start:end], dtype) for start, end in self.bounds]


def row_index(slots: IntArray, pool: mx.array) -> mx.array:
    """For `take_rows` of pools of this shape: (kv_heads, *slots.shape)."""
    kv_heads, num_slots, _ = pool.shape
    first = np.arange(kv_heads).reshape(-1, *[1] * slots.ndim) * num_slots
    return mx.array(first + slots)


def take_rows(pool: mx.array, index: mx.array, dtype: mx.Dtype) -> mx.array:
    """(*index.shape, head_dim), copied; of a quantised pool in `dtype`.

    `pool[:, slots]` indexes heads and slots apart, in three more operations, and takes a fifth to a
    third longer.
    """
    return loaded(mx.take(pool.reshape(-1, pool.shape[-1]), index, axis=0), dtype)


def padded_slots(
    tables: SequenceTables, rows: list[int], first: int
) -> tuple[IntArray, npt.NDArray[np.float32]]:
    """Of these sequences: the slots of their positions from `first` on, and 0 or, past their ends,
    minus infinity.

    Both (sequences, positions). Past its end a sequence has its first slot, which holds a number.
    """
    contexts, page_tables = tables.context_lens[rows], tables.page_tables[rows]
    position = np.arange(first, contexts.max())
    is_seen = position < contexts[:, None]
    pages = page_tables[:, position // tables.page_size]
    slots: IntArray = pages * tables.page_size + position % tables.page_size
    slots = np.where(is_seen, slots, page_tables[:, :1] * tables.page_size)
    return slots, np.where(is_seen, np.float32(0), np.float32(-np.inf))

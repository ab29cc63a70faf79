"""Rows of a pool as plain arrays: views of runs of slots, or copies of any slots."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from metal_kernels.quantised import loaded
from metal_kernels.tables import IntArray, SequenceTables


def read_runs(pool: mx.array, runs: list[tuple[int, int]], dtype: mx.Dtype) -> mx.array:
    """(1, kv_heads, positions, head_dim): a view where the positions are one run of slots.

    Of a quantised pool a copy in `dtype`.
    """
    parts = [pool[None, :, start:end] for start, end in runs]
    rows = parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=2)
    return loaded(rows, dtype)


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

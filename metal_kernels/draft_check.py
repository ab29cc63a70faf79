"""The self-test of rows of drafts that are read together, run on this machine before they are."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from metal_kernels.metal import MetalBackend
from metal_kernels.ops import Attention
from metal_kernels.reading import read
from metal_kernels.tables import SequenceTables

# What mlx raises for a text that Apple's compiler refuses, and for too many threads.
REFUSALS = (RuntimeError, ValueError)
_PAGE_SIZE, _KV_HEADS, _HEAD_DIM = 32, 2, 128
_GROUPS = (4, 8)  # query heads for each of keys: those of draft_decode, and of grouped_drafts
_LENGTH, _ROWS = 258, 4  # of the last row, two keys past the end of a partition; and rows
_DTYPES = (mx.float16, mx.bfloat16)


def why_not_together(backend: MetalBackend) -> str | None:
    """Return why rows of a draft may not be read together here; None if each has the bits it has alone."""
    try:
        differ = [
            f"rows are others than alone in {dtype}"
            for group in _GROUPS
            for dtype in _DTYPES
            if not _are_equal(backend, dtype, group)
        ]
    except REFUSALS as error:
        return str(error)
    return differ[0] if differ else None


def _are_equal(backend: MetalBackend, dtype: mx.Dtype, group: int) -> bool:
    num_pages = -(-_LENGTH // _PAGE_SIZE)
    k_pool, v_pool = (
        backend.new_pool(num_pages, _KV_HEADS, _PAGE_SIZE, _HEAD_DIM, dtype) for _ in range(2)
    )
    keys, values = (_draw((_LENGTH, _KV_HEADS, _HEAD_DIM), dtype, seed) for seed in (1, 2))
    slots = np.arange(_LENGTH, dtype=np.int32)
    k_pool, v_pool = backend.write_kv(keys, values, k_pool, v_pool, slots)
    queries = _draw((_ROWS, _KV_HEADS * group, _HEAD_DIM), dtype, 3)
    attention = Attention(_HEAD_DIM**-0.5)
    together = backend.paged_decode(queries, k_pool, v_pool, _tables(0, _ROWS), attention)
    alone = [
        backend.paged_decode(
            queries[row : row + 1], k_pool, v_pool, _tables(row, row + 1), attention
        )
        for row in range(_ROWS)
    ]
    return bool(read(mx.array_equal(together, mx.concatenate(alone))))


def _tables(first: int, end: int) -> SequenceTables:
    """Tables of these rows of the draft."""
    pages = np.arange(-(-_LENGTH // _PAGE_SIZE), dtype=np.int32)
    lengths = np.arange(first, end, dtype=np.int32) + _LENGTH - _ROWS + 1
    starts = np.arange(end - first + 1, dtype=np.int32)
    return SequenceTables(np.tile(pages, (end - first, 1)), lengths, starts, _PAGE_SIZE)


def _draw(shape: tuple[int, ...], dtype: mx.Dtype, seed: int) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)

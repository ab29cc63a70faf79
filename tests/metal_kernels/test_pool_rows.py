"""Rows written to any slots and read from them, and that writing takes no second pool."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from metal_kernels.choice import select_backend
from metal_kernels.pool_rows import RowWrites, Runs
from metal_kernels.tables import SequenceTables

_HEADS, _SLOTS, _DIM = 3, 2_048, 16


def test_rows_are_where_they_were_written_to_and_nowhere_else() -> None:
    for dtype in [mx.float32, mx.bfloat16, mx.int8]:
        for lengths in [
            [1],
            [40],
            [1, 1, 1],
            [1] * 16,
            [3, 2, 1, 1, 3],
            [1, 1, 50, 1, 1],
            [7, 1, 1, 2, 9, 1],
            [5] * 6,
        ]:
            draw = np.random.default_rng(len(lengths))
            expected = draw.integers(-100, 100, (_HEADS, _SLOTS, _DIM))
            pool = mx.array(expected).astype(dtype)
            starts = draw.choice(_SLOTS // 64, len(lengths), replace=False) * 64
            slots = np.concatenate(
                [
                    np.arange(start, start + length)
                    for start, length in zip(starts, lengths, strict=True)
                ]
            )
            rows = draw.integers(-100, 100, (len(slots), _HEADS, _DIM))
            RowWrites.of(slots.astype(np.int32)).write(pool, mx.array(rows).astype(dtype))
            expected[:, slots] = rows.swapaxes(0, 1)
            assert (np.array(pool.astype(mx.int32)) == expected).all(), (dtype, lengths)


@pytest.mark.parametrize("lengths", [[1, 1], [1] * 8, [30, 1, 1, 1, 1]], ids=str)
def test_writing_does_not_copy_the_pool(lengths: list[int]) -> None:
    slots = np.concatenate(
        [np.arange(64 * at, 64 * at + length) for at, length in enumerate(lengths)]
    ).astype(np.int32)
    pool = mx.zeros((_HEADS, 1 << 16, _DIM))
    rows = mx.ones((len(slots), _HEADS, _DIM))
    mx.eval(pool, rows)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    RowWrites.of(slots).write(pool, rows)
    mx.eval(pool)
    assert mx.get_peak_memory() - before < pool.nbytes // 8
    assert mx.sum(pool).item() == rows.size


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize(
    "bounds", [[(7, 40)], [(7, 40), (3, 5)], [(9, 10), (4, 5), (60, 90)]], ids=str
)
def test_runs_are_read_in_order(bounds: list[tuple[int, int]], dtype: mx.Dtype) -> None:
    draw = np.random.default_rng(0)
    runs = Runs(bounds)
    for heads in (_HEADS, 1):  # one object reads the pools of all layers
        rows = draw.integers(-100, 100, (heads, _SLOTS, _DIM))
        pool = mx.array(rows).astype(dtype)
        expected = np.concatenate([rows[:, start:end] for start, end in bounds], axis=1)[None]
        assert (np.array(runs.read(pool, dtype).astype(mx.int32)) == expected).all()
        each = mx.concatenate(runs.read_each(pool, dtype), axis=1)[None]
        assert (np.array(each.astype(mx.int32)) == expected).all()


def test_rows_without_any_elements_are_written_and_gathered() -> None:
    """MiniMax M3 keeps keys for choosing blocks, and no values beside them."""
    backend = select_backend("cpu")
    pools = [backend.new_pool(4, 1, 16, dim, mx.float32) for dim in (8, 0)]
    keys, values = mx.ones((20, 1, 8)), mx.zeros((20, 1, 0))
    slots = np.concatenate([np.arange(32, 48), np.arange(4)]).astype(np.int32)
    k_pool, v_pool = backend.write_kv(keys, values, *pools, slots)
    one = [np.array(numbers, dtype=np.int32) for numbers in ([[2, 0]], [20], [0, 20])]
    tables = SequenceTables(*one, page_size=16)
    k, v = backend.gather_kv(k_pool, v_pool, tables)
    assert (k.shape, v.shape) == ((1, 1, 20, 8), (1, 1, 20, 0))
    assert mx.sum(k).item() == 160

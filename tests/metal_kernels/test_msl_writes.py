"""The kernels write and copy bit by bit and change nothing else, in every dtype and shape."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from metal_kernels.limits import HEAD_DIMS, PAGE_SIZES
from metal_kernels.metal import MetalBackend
from tests.emulated import emulated_factory
from tests.metal_kernels.oracle import read_slots

NUM_PAGES = 6
# Every size of a row: bits of float16 and bfloat16 take the same way.
ROWS = [
    (dtype, head_dim)
    for at, head_dim in enumerate(HEAD_DIMS)
    for dtype in (mx.float32, (mx.float16, mx.bfloat16)[at % 2])
]
Pools = tuple[mx.array, mx.array]


def bits(rows: np.ndarray, dtype: mx.Dtype) -> mx.array:
    """An array of any bit patterns, NaN payloads included."""
    return mx.array(rows.astype(np.uint16 if dtype.size == 2 else np.uint32)).view(dtype)


def random_bits(shape: tuple[int, ...], dtype: mx.Dtype, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1 << (8 * dtype.size), shape)


def filled(
    backend: MetalBackend, page_size: int, head_dim: int, dtype: mx.Dtype
) -> tuple[Pools, list[np.ndarray]]:
    """Pools of 3 heads with something in every slot, and what they hold."""
    shape = (NUM_PAGES, 3, page_size, head_dim, dtype)
    pools = backend.new_pool(*shape), backend.new_pool(*shape)
    slots = np.arange(NUM_PAGES * page_size, dtype=np.int32)
    rows = [random_bits((len(slots), 3, head_dim), dtype, seed) for seed in (1, 2)]
    backend.write_kv(bits(rows[0], dtype), bits(rows[1], dtype), *pools, slots)
    held = read(backend, pools)
    for pool, wanted in zip(held, rows, strict=True):
        assert np.array_equal(pool, wanted)
    return pools, held


def read(backend: MetalBackend, pools: Pools) -> list[np.ndarray]:
    backend.settle()
    return [read_slots(pool).copy() for pool in pools]


def patterns(size: int) -> dict[str, list[int]]:
    """Slots of a step, named by their pattern."""
    return {
        "one": [3 * size + 1],
        "last": [NUM_PAGES * size - 1],
        "backwards": [9, 8, 7],
        "one page": list(range(2 * size, 3 * size)),
        "pages out of order": [*range(4 * size, 5 * size), *range(size)],
        "consecutive pages": list(range(size, 4 * size)),
        "a page's length, not aligned": list(range(size // 2, size // 2 + size)),
        "a page but its last": list(range(size, 2 * size - 1)),
        "a page with two rows swapped": [size + 1, size, *range(size + 2, 2 * size)],
        "decodes, then chunks": [
            *(5 * size + 3, 5 * size + 9),
            *range(size - 3, 3 * size + 4),
            *range(4 * size, 5 * size),
        ],
    }


def test_rows_go_to_their_slots_bit_by_bit(checked_backend: MetalBackend) -> None:
    for page_size in PAGE_SIZES:
        for pattern in patterns(16):
            pools, held = filled(checked_backend, page_size, 64, mx.float16)
            check_write(checked_backend, pools, held, patterns(page_size)[pattern])


@pytest.mark.long
def test_every_row_size_is_written_bit_by_bit(checked_backend: MetalBackend) -> None:
    for dtype, head_dim in ROWS:
        for page_size in PAGE_SIZES:
            pools, held = filled(checked_backend, page_size, head_dim, dtype)
            slots = patterns(page_size)["decodes, then chunks"]
            check_write(checked_backend, pools, held, slots)


def check_write(
    backend: MetalBackend,
    pools: Pools,
    held: list[np.ndarray],
    slots: list[int],
) -> None:
    dtype, head_dim = pools[0].dtype, pools[0].shape[-1]
    rows = [random_bits((len(slots), 3, head_dim), dtype, seed) for seed in (3, 4)]
    for pool, new in zip(held, rows, strict=True):
        pool[slots] = new
    returned = backend.write_kv(
        bits(rows[0], dtype), bits(rows[1], dtype), *pools, np.array(slots, np.int32)
    )
    assert returned[0] is pools[0]
    assert returned[1] is pools[1]
    for pool, wanted in zip(read(backend, pools), held, strict=True):
        assert np.array_equal(pool, wanted)


def test_writing_no_rows_changes_nothing(checked_backend: MetalBackend) -> None:
    pools, held = filled(checked_backend, 16, 64, mx.float16)
    check_write(checked_backend, pools, held, [])


def test_transposed_rows_are_written(checked_backend: MetalBackend) -> None:
    """As models pass them: (rows, heads, 1, dim), transposed from (rows, 1, heads, dim)."""
    pools, held = filled(checked_backend, 16, 64, mx.float16)
    rows = random_bits((64, 2, 3), mx.float16, 5)
    keys = bits(rows, mx.float16).transpose(1, 2, 0)
    checked_backend.write_kv(keys, keys, *pools, np.array([7, 70], np.int32))
    for pool, wanted in zip(read(checked_backend, pools), held, strict=True):
        wanted[[7, 70]] = rows.transpose(1, 2, 0)
        assert np.array_equal(pool, wanted)


@pytest.mark.slow
def test_copied_pages_are_bit_equal_and_others_stay(checked_backend: MetalBackend) -> None:
    sources, targets = np.array([3, 1, 3], np.int32), np.array([0, 5, 2], np.int32)
    for dtype, head_dim in ROWS:
        for page_size in PAGE_SIZES:
            pools, held = filled(checked_backend, page_size, head_dim, dtype)
            checked_backend.copy_pages(*pools, sources, targets, page_size)
            for pool, wanted in zip(read(checked_backend, pools), held, strict=True):
                pages = wanted.reshape(NUM_PAGES, -1)
                pages[targets] = pages[sources]
                assert np.array_equal(pool, wanted), (dtype, head_dim)


def test_copying_no_pages_changes_nothing(checked_backend: MetalBackend) -> None:
    pools, held = filled(checked_backend, 16, 64, mx.float16)
    none = np.zeros(0, np.int32)
    checked_backend.copy_pages(*pools, none, none, 16)
    for pool, wanted in zip(read(checked_backend, pools), held, strict=True):
        assert np.array_equal(pool, wanted)


def test_any_mixture_of_runs_is_written_bit_by_bit(fast_backend: MetalBackend) -> None:
    for seed in range(8):
        random = np.random.default_rng(seed)
        pools, held = filled(fast_backend, 16, 64, mx.bfloat16)
        cuts = np.sort(random.choice(np.arange(1, NUM_PAGES * 16), 9, replace=False))
        runs: list[Any] = np.split(np.arange(NUM_PAGES * 16), cuts)
        random.shuffle(runs)
        check_write(fast_backend, pools, held, np.concatenate(runs[:7]).tolist())


def test_whole_pages_and_single_rows_have_kernels_of_their_own() -> None:
    """Otherwise aligned chunks would be no faster, and no result would show it."""
    taken: list[tuple[str, int]] = []
    make = emulated_factory()

    def recording(spec: Any, source: str) -> Any:
        kernel = make(spec, source)

        def call(**arguments: Any) -> Any:
            taken.append((spec.name, arguments["grid"][2]))
            return kernel(**arguments)

        return call

    backend = MetalBackend(recording)
    pools = backend.new_pool(8, 1, 16, 64, mx.float32), backend.new_pool(8, 1, 16, 64, mx.float32)
    slots = np.array([5, *range(32, 64), *range(100, 120)], np.int32)
    rows = mx.zeros((len(slots), 1, 64))
    backend.write_kv(rows, rows, *pools, slots)
    assert taken == [("write_kv_pages", 2), ("write_kv_tokens", 21)]

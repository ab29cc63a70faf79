"""Pools in 8 bits: every backend writes the same bytes, and attends over what these bytes mean."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from metal_kernels.choice import select_backends
from metal_kernels.limits import HEAD_DIMS
from metal_kernels.metal import DTYPES, MetalBackend
from metal_kernels.ops import Attention, Backend, LayerShape
from metal_kernels.quantised import dequantise, quantise
from metal_kernels.reference import ReferenceBackend
from metal_kernels.x86.backend import X86Backend
from tests.emulated import emulated_backend
from tests.metal_kernels.oracle import Case, Paged, quantised

PLAIN = [ReferenceBackend(), X86Backend()]
SLOTS = np.array([*range(16, 64), *range(5, 12), *range(80, 95), 3], np.int32)
NUM_PAGES = 7

# Each option of attention, page size, group and way through a kernel.
DECODES = (
    Case(((0, 1), (15, 1), (16, 1), (52, 1)), group=4),
    Case(((0, 1), (300, 1)), 32, group=7, kv_heads=1, dtype=mx.bfloat16, has_sinks=True),
    Case(((31, 1), (70, 1)), 32, group=1, key_dim=80, value_dim=80, dtype=mx.float16, window=21),
    Case(((20, 1), (5, 1)), 16, key_dim=256, value_dim=256, softcap=2.0),
    Case(((20, 1), (5, 1)), 64, key_dim=512, value_dim=512, group=3, dtype=mx.float16),
    Case(((40, 1),), 16, key_dim=128, value_dim=128, group=16, is_scattered=False),
)
CHUNKS = (
    Case(((0, 17), (20, 9), (35, 1)), group=4),
    Case(((3, 33), (40, 5)), 32, group=2, dtype=mx.bfloat16, has_sinks=True, window=21),
    Case(((7, 20),), 32, group=1, key_dim=80, value_dim=80, dtype=mx.float16, softcap=2.0),
    Case(((3, 18),), 16, key_dim=512, value_dim=512, dtype=mx.float16),
    Case(((16, 32),), 16, key_dim=128, value_dim=128, is_scattered=False),
)
CASES = [replace(case, is_quantised=True) for case in (*DECODES, *CHUNKS)]


@pytest.fixture(scope="module")
def emulated() -> MetalBackend:
    return emulated_backend(check=True)


def rows_of(num_heads: int, head_dim: int, dtype: mx.Dtype, seed: int = 0) -> mx.array:
    """Rows of very different sizes: zeros, numbers next to zero, NaN and infinities among them."""
    random = np.random.default_rng(seed)
    shape = (len(SLOTS), num_heads, head_dim)
    rows = random.standard_normal(shape, np.float32)
    rows *= np.exp(3 * random.standard_normal((*shape[:2], 1))).astype(np.float32)
    rows[3, 0] = 0
    rows[4, 0, 2] = np.nan
    rows[5, 0, head_dim - 1] = -np.inf
    rows[6, 0], rows[7, 0] = 1e-37, -2e-36  # below and above the smallest row that is kept
    rows[8, 0, 1] = 3e38
    rows[9, 0, :6] = (127, 0.5, 1.5, 2.5, -0.5, -1.5)  # halves, with a scale of 1
    rows[9, 0, 6:] = 3
    return mx.array(rows).astype(dtype)


def held(backend: Backend, keys: mx.array, values: mx.array) -> list[np.ndarray]:
    """All slots of a pool to which these rows were written."""
    _, num_heads, head_dim = keys.shape
    k_pool, v_pool = (backend.new_pool(NUM_PAGES, num_heads, 16, head_dim, mx.int8) for _ in "kv")
    pools = backend.write_kv(keys, values, k_pool, v_pool, SLOTS)
    backend.settle(*pools)
    found = backend.read_kv(*pools, np.arange(NUM_PAGES * 16, dtype=np.int32))
    return [np.array(side) for side in found]


def expected(rows: mx.array) -> np.ndarray:
    values, scales = quantised(np.array(rows.astype(mx.float32)))
    packed = np.concatenate([values, np.ascontiguousarray(scales, np.float32).view(np.int8)], -1)
    everywhere = np.zeros((NUM_PAGES * 16, *packed.shape[1:]), np.int8)
    everywhere[SLOTS] = packed
    return everywhere


@pytest.mark.slow
def test_every_backend_writes_the_bytes_that_numpy_computes(emulated: MetalBackend) -> None:
    for dtype in DTYPES:
        for head_dim in [24, *HEAD_DIMS]:
            keys, values = (rows_of(3, head_dim, dtype, seed) for seed in (1, 2))
            backends: list[Backend] = [*PLAIN] if head_dim not in HEAD_DIMS else [*PLAIN, emulated]
            for backend in backends:
                found = held(backend, keys, values)
                assert np.array_equal(found[0], expected(keys)), backend.name
                assert np.array_equal(found[1], expected(values)), backend.name


def test_a_row_is_near_what_was_written_and_bad_numbers_stay_bad() -> None:
    rows = rows_of(1, 64, mx.float32)
    found, wanted = (np.array(x)[:, 0] for x in (dequantise(quantise(rows)), rows))
    assert np.isnan(found[[4, 5]]).all()
    assert not found[[3, 6]].any()
    usual = [row for row in range(len(wanted)) if row not in (3, 4, 5, 6)]
    largest = np.abs(wanted[usual]).max(axis=1, keepdims=True)
    assert (np.abs(found[usual] - wanted[usual]) <= largest / 253).all()
    assert found[9, :6].tolist() == [127, 0, 2, 2, 0, -2]


@pytest.mark.parametrize("num_heads", [1, 8, 11])
def test_any_number_of_heads_is_written(num_heads: int, emulated: MetalBackend) -> None:
    keys = rows_of(num_heads, 64, mx.float16)
    assert np.array_equal(held(emulated, keys, keys)[0], expected(keys))


@pytest.mark.long
def test_attention_is_that_over_what_the_bytes_mean(emulated: MetalBackend) -> None:
    for case in CASES:
        for backend in (*PLAIN, emulated):
            found = Paged(backend, case)
            assert found.error() <= found.tolerance, backend.name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_decodes_that_share_a_prefix_and_gathered_ones_are_right(dtype: mx.Dtype) -> None:
    case = Case(((0, 1), (15, 1), (52, 1)), dtype=dtype, is_quantised=True)
    for copied_per_product in (0, 1 << 30):
        found = Paged(X86Backend(copied_per_product), case)
        assert found.error() <= found.tolerance


@pytest.mark.parametrize("options", [{}, {"window": 70, "dtype": mx.bfloat16}], ids=str)
def test_long_chunks_are_gathered_as_numbers(
    options: dict[str, Any], emulated: MetalBackend
) -> None:
    settings: dict[str, Any] = {"dtype": mx.float16, "is_quantised": True, **options}
    found = Paged(emulated, Case(((40, 257), (0, 256)), **settings))
    assert found.error() <= found.tolerance


@pytest.mark.parametrize("backend", [*PLAIN, emulated_backend(check=True)], ids=lambda b: b.name)
def test_rows_that_are_read_can_be_written_elsewhere_bit_by_bit(backend: Backend) -> None:
    """As the disk cache does, in whole pages and alone; then copied and resized."""
    rows = rows_of(3, 80, mx.float16)
    shape = (NUM_PAGES, 3, 16, 80, mx.int8)
    pools = backend.write_kv(rows, rows, backend.new_pool(*shape), backend.new_pool(*shape), SLOTS)
    backend.settle(*pools)
    read = backend.read_kv(*pools, SLOTS)
    assert read[0].shape == (len(SLOTS), 3, 84)
    others = backend.new_pool(*shape), backend.new_pool(*shape)
    others = backend.write_kv(read[0], read[1], *others, SLOTS)
    one, two = (np.array([page], np.int32) for page in (2, 0))
    others = backend.copy_pages(*others, one, two, 16)
    backend.settle(*others)
    resized = [backend.resize_pool(pool, 5, 16) for pool in others]
    found = backend.read_kv(resized[0], resized[1], np.arange(80, dtype=np.int32))
    wanted = expected(rows)
    wanted[:16] = wanted[32:48]
    for side in found:
        assert np.array_equal(np.array(side), wanted[:80])


@pytest.mark.parametrize("backend", [*PLAIN, emulated_backend()], ids=lambda b: b.name)
def test_what_does_not_fit_is_refused(backend: Backend) -> None:
    pools = [backend.new_pool(2, 1, 16, 64, mx.int8) for _ in "kv"]
    one = np.array([3], np.int32)
    for rows in (
        mx.zeros((1, 1, 68)),
        mx.zeros((1, 1, 64), mx.int8),
        mx.zeros((1, 1, 64), mx.int32),
    ):
        with pytest.raises(ValueError, match=r"take|the pool is"):
            backend.write_kv(rows, rows, pools[0], pools[1], one)
    found = Paged(backend, Case(((3, 1),), kv_heads=1, is_quantised=True))
    queries = mx.zeros((1, 2, 64), mx.int8)
    with pytest.raises(ValueError, match="queries are"):
        backend.paged_decode(queries, *found.pools(), found.tables, Attention(1.0))
    latent = mx.zeros((1, 2, 64))
    with pytest.raises(ValueError, match="latents are not quantised"):
        backend.paged_latent(latent, latent, *found.pools(), found.tables, scale=1.0)


def test_a_layer_that_the_kernels_do_not_take_gets_plain_mlx() -> None:
    layers = [LayerShape(24, 24, mx.float16, is_quantised=True)]
    assert [backend.name for backend in select_backends("auto", layers)] == ["cpu"]

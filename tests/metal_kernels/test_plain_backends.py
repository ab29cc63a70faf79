"""The backends in plain mlx answer as float64 numpy does; their writes touch only their slots."""

from __future__ import annotations

import itertools

import mlx.core as mx
import numpy as np
import pytest

from metal_kernels.ops import Attention, Backend
from metal_kernels.plain import PlainBackend
from metal_kernels.reference import ReferenceBackend
from metal_kernels.tables import SequenceTables
from metal_kernels.x86.backend import X86Backend
from tests.metal_kernels.latent_oracle import PagedLatents, latent_case
from tests.metal_kernels.oracle import CASES, TOLERANCES, Case, Paged, read_slots


@pytest.fixture(
    params=[ReferenceBackend(), PlainBackend(), X86Backend()], ids=["reference", "plain", "x86"]
)
def backend(request: pytest.FixtureRequest) -> Backend:
    plain: Backend = request.param
    return plain


@pytest.mark.slow
def test_attention_over_pages_is_that_over_plain_arrays(backend: Backend) -> None:
    for case in CASES:
        found = Paged(backend, case)
        assert found.error() <= found.tolerance, str(case)


def test_decodes_are_right_gathered_or_joined() -> None:
    for copied_per_product in [0, 1 << 30]:
        for options in [
            {},
            {"has_sinks": True},
            {"window": 9},
            {"softcap": 2.0, "has_sinks": True},
            {"is_scattered": False},
        ]:
            case = Case(((0, 1), (15, 1), (16, 1), (52, 1)), group=4, **options)
            found = Paged(X86Backend(copied_per_product), case)
            assert found.error() <= found.tolerance, (copied_per_product, options)


def test_attention_over_latents_is_right(backend: Backend) -> None:
    for sequences in [((0, 1), (16, 1), (40, 1)), ((52, 1),), ((0, 17), (20, 9), (40, 1))]:
        for dtype, is_scattered in itertools.product(TOLERANCES, (True, False)):
            case = latent_case(sequences, heads=5, dtype=dtype, is_scattered=is_scattered)
            found = PagedLatents(backend, case)
            assert found.error() <= found.tolerance, (dtype, is_scattered)


@pytest.mark.parametrize("sequences", [((299, 1),), ((60, 40), (0, 9))], ids=["decode", "chunks"])
def test_attention_over_many_latents_is_right(sequences: tuple[tuple[int, int], ...]) -> None:
    """On a CPU many scores are written out, with sizes as models have them."""
    found = PagedLatents(X86Backend(), latent_case(sequences, heads=128, dims=(512, 64)))
    assert found.error() <= found.tolerance


def test_a_sequence_gets_the_same_answer_alone_and_among_others(backend: Backend) -> None:
    several = Paged(backend, Case(((0, 17), (20, 9), (40, 1)), window=12))
    queries = mx.random.normal((27, 4, 64), key=mx.random.key(1))
    k_pool, v_pool = several.pools()
    together = backend.paged_prefill(
        queries, k_pool, v_pool, several.tables, Attention(0.1, window=12)
    )
    for sequence, first, last in several.tables.queries():
        alone = SequenceTables(
            several.tables.page_tables[sequence : sequence + 1],
            several.tables.context_lens[sequence : sequence + 1],
            np.array([0, last - first], np.int32),
            16,
        )
        answer = backend.paged_prefill(
            queries[first:last], k_pool, v_pool, alone, Attention(0.1, window=12)
        )
        assert mx.array_equal(answer, together[first:last])


def test_a_decode_with_several_rows_of_a_sequence_is_refused(backend: Backend) -> None:
    found = Paged(backend, Case(((3, 2),)))
    k_pool, v_pool = found.pools()
    with pytest.raises(ValueError, match="one row per sequence"):
        backend.paged_decode(mx.zeros((2, 4, 64)), k_pool, v_pool, found.tables, Attention(1.0))


def filled_pools(backend: Backend, dtype: mx.Dtype) -> tuple[mx.array, mx.array]:
    """Two pools of 6 pages of 16 slots, 3 heads, with numbers in every slot."""
    mx.random.seed(5)
    pools = []
    for head_dim in (8, 4):
        empty = backend.new_pool(6, 3, 16, head_dim, dtype)
        pools.append(mx.random.normal(empty.shape).astype(dtype))
    mx.eval(pools)
    return pools[0], pools[1]


def rows_of(count: int, head_dim: int, dtype: mx.Dtype) -> mx.array:
    return mx.random.normal((count, 3, head_dim), key=mx.random.key(9)).astype(dtype)


WRITES = {
    "first": [0],
    "last": [95],
    "over a page": [15, 16],
    "backwards": [31, 30, 29],
    "pages": list(range(16, 48)),
    "mixed": [5, 6, 7, 90, 91, 40, 41, 42, 0],
    "none": [],
}


def test_a_write_is_bit_exact_and_leaves_every_other_slot(backend: Backend) -> None:
    for dtype in [mx.float32, mx.float16, mx.bfloat16]:
        for name, slots in WRITES.items():
            pools = filled_pools(backend, dtype)
            keys, values = (rows_of(len(slots), dim, dtype) for dim in (8, 4))
            expected = [read_slots(pool).copy() for pool in pools]
            for pool, rows in zip(expected, (keys, values), strict=True):
                bits = np.array(rows.view(mx.uint16 if dtype.size == 2 else mx.uint32))
                pool[slots] = bits.reshape(len(slots), *pool.shape[1:])
            written = backend.write_kv(keys, values, *pools, np.array(slots, np.int32))
            for found, wanted in zip(written, expected, strict=True):
                assert np.array_equal(read_slots(found), wanted), name


def test_nan_and_infinity_are_written_bit_by_bit(backend: Backend) -> None:
    pools = filled_pools(backend, mx.float32)
    special = np.array([np.nan, np.inf, -np.inf, -0.0, 1e-45, 3e38, 1.0, 2.0], np.float32)
    keys = mx.array(np.broadcast_to(special, (2, 3, 8)))
    k_pool, _ = backend.write_kv(
        keys, rows_of(2, 4, mx.float32), *pools, np.array([3, 50], np.int32)
    )
    assert np.array_equal(read_slots(k_pool)[[3, 50]], np.array(keys.view(mx.uint32)))


def test_rows_written_singly_or_together_give_the_same_pool(backend: Backend) -> None:
    slots = np.array([4, 5, 6, 31, 32, 33, 90], np.int32)
    keys, values = rows_of(7, 8, mx.float16), rows_of(7, 4, mx.float16)
    whole = backend.write_kv(keys, values, *filled_pools(backend, mx.float16), slots)
    pools = filled_pools(backend, mx.float16)
    for row in range(7):
        at = slice(row, row + 1)
        pools = backend.write_kv(keys[at], values[at], *pools, slots[at])
    for one, other in zip(whole, pools, strict=True):
        assert np.array_equal(read_slots(one), read_slots(other))


def test_copied_pages_are_bit_equal_and_others_stay(backend: Backend) -> None:
    for dtype in [mx.float32, mx.bfloat16]:
        pools = filled_pools(backend, dtype)
        expected = [read_slots(pool).copy() for pool in pools]
        for pool in expected:
            pool[0:16], pool[80:96], pool[32:48] = (
                pool[48:64].copy(),
                pool[16:32],
                pool[48:64].copy(),
            )
        sources, targets = np.array([3, 1, 3], np.int32), np.array([0, 5, 2], np.int32)
        copied = backend.copy_pages(*pools, sources, targets, 16)
        for found, wanted in zip(copied, expected, strict=True):
            assert np.array_equal(read_slots(found), wanted), dtype


def test_a_new_pool_holds_zeros_in_all_its_slots(backend: Backend) -> None:
    pool = backend.new_pool(4, 3, 32, 8, mx.bfloat16)
    assert pool.dtype == mx.bfloat16
    assert read_slots(pool).shape == (128, 3, 8)
    assert not read_slots(pool).any()

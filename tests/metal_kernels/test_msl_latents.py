"""The kernel for latents answers as float64 numpy does, for every shape and dtype that it takes.

All unused slots hold NaN, and page tables are padded with a page that does not exist.
"""

from __future__ import annotations

import itertools
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from metal_kernels.latents import LATENT_DIMS, partition_size, tile_bytes, tile_keys, tile_lines
from metal_kernels.metal import DTYPES, MetalBackend
from metal_kernels.tables import SequenceTables
from tests.metal_kernels.latent_oracle import PagedLatents, latent_case
from tests.metal_kernels.oracle import read_slots

DECODES = ((0, 1), (15, 1), (16, 1), (partition_size(16) + 18, 1))
CHUNKS = ((0, 1), (0, 17), (30, 5))


@pytest.mark.slow
@pytest.mark.parametrize("sequences", [DECODES, CHUNKS], ids=["decodes", "chunks"])
@pytest.mark.parametrize(
    ("dims", "dtype", "heads"), [((512, 64), mx.float16, 5), ((256, 64), mx.float32, 20)], ids=str
)
def test_latents_are_attended_right_and_pass_every_check(
    dims: tuple[int, int],
    dtype: mx.Dtype,
    heads: int,
    sequences: Any,
    checked_backend: MetalBackend,
) -> None:
    found = PagedLatents(checked_backend, latent_case(sequences, heads, dims, dtype))
    assert found.error() <= found.tolerance


@pytest.mark.slow
@pytest.mark.parametrize("heads", [1, 20, 40, 128])
@pytest.mark.parametrize("sequences", [((300, 1), (2, 1)), ((0, 3), (30, 2))], ids=["1row", "rows"])
def test_any_number_of_heads_is_right(
    heads: int, sequences: Any, fast_backend: MetalBackend
) -> None:
    case = latent_case(sequences, heads, (256, 64), mx.float16, page_size=32)
    found = PagedLatents(fast_backend, case)
    assert found.error() <= found.tolerance


@pytest.mark.long
@pytest.mark.parametrize("dims", LATENT_DIMS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_combination_is_right(
    dtype: mx.Dtype, dims: tuple[int, int], fast_backend: MetalBackend
) -> None:
    for heads, page_size in itertools.product((16, 20, 64, 128), (16, 64)):
        for sequences in (((0, 1), (63, 1), (700, 1)), ((0, 40), (100, 3))):
            case = latent_case(sequences, heads, dims, dtype, page_size=page_size)
            found = PagedLatents(fast_backend, case)
            assert found.error() <= found.tolerance, case


def test_scores_far_apart_are_right(checked_backend: MetalBackend) -> None:
    """Scores of a thousand keep three to four decimal places in float32, in each row."""
    for sequences in (((99, 1), (3, 1)), ((20, 30),)):
        found = PagedLatents(checked_backend, latent_case(sequences, 8, (256, 64)))
        found.scale = 30.0
        assert found.error() <= 2e-4


def test_a_decode_is_bit_identical_alone_and_in_any_batch(fast_backend: MetalBackend) -> None:
    contexts = (1, 200, 16, 65)
    sequences = tuple((context - 1, 1) for context in contexts)
    found = PagedLatents(fast_backend, latent_case(sequences, 20, (256, 64), mx.float16))
    pools, tables = found.paged.pools(), found.paged.tables

    def decode(order: list[int]) -> mx.array:
        some = SequenceTables(
            tables.page_tables[order],
            tables.context_lens[order],
            np.arange(len(order) + 1, dtype=np.int32),
            tables.page_size,
        )
        rows = found.q_latent[mx.array(order)], found.q_rope[mx.array(order)]
        return fast_backend.paged_latent(*rows, *pools, some, scale=0.1)

    alone = [decode([row]) for row in range(4)]
    for order in ([0, 1, 2, 3], [3, 0, 1], [2, 2, 1]):
        together = decode(order)
        for place, row in enumerate(order):
            assert mx.array_equal(together[place], alone[row][0]), (order, row)


def test_latents_and_rotated_keys_are_written_and_copied_bit_by_bit(
    checked_backend: MetalBackend,
) -> None:
    """Their rows differ in length; whole pages, single rows and copies have kernels of their own."""
    pools = [checked_backend.new_pool(5, 1, 16, dim, mx.float16) for dim in (256, 64)]
    slots = np.array([3, *range(32, 64), 70], np.int32)
    rows = [
        mx.random.normal((len(slots), 1, dim), key=mx.random.key(dim)).astype(mx.float16)
        for dim in (256, 64)
    ]
    checked_backend.write_kv(*rows, *pools, slots)
    copied = np.array([2, 3], np.int32), np.array([0, 1], np.int32)
    checked_backend.copy_pages(*pools, *copied, 16)
    checked_backend.settle()
    held = checked_backend.read_kv(*pools, slots[1:])
    for pool, written, found in zip(pools, rows, held, strict=True):
        assert mx.array_equal(found, written[1:])
        bits = read_slots(pool)
        assert (bits[:32] == bits[32:64]).all()
        assert not bits[64:70].any()
        assert not bits[71:].any()


@pytest.mark.parametrize("dims", LATENT_DIMS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_tile_fits_in_threadgroup_memory_and_partitions_are_whole_tiles(
    dtype: mx.Dtype, dims: tuple[int, int]
) -> None:
    keys = tile_keys(*dims, dtype.size)
    assert tile_bytes(*dims, dtype.size, keys) <= 32 << 10
    assert 2 * tile_bytes(*dims, dtype.size, keys) <= 60 << 10, "two threadgroups stay on a core"
    if keys < 32:
        twice = tile_bytes(*dims, dtype.size, 2 * keys)
        assert twice > 32 << 10 or 2 * twice > 60 << 10
    for heads in (1, 33, 65, 128):
        assert partition_size(heads) % keys == 0


def test_heads_take_as_few_lines_as_possible() -> None:
    assert [tile_lines(heads) for heads in (1, 8, 16, 20, 32, 40, 64, 96, 128)] == [
        *(8, 8, 16, 24, 32, 24, 32, 32, 32)
    ]


def test_pools_of_other_latents_are_refused(checked_backend: MetalBackend) -> None:
    pools = [checked_backend.new_pool(2, 1, 16, dim, mx.float16) for dim in (128, 64)]
    queries = [mx.zeros((1, 4, dim), mx.float16) for dim in (128, 64)]
    tables = SequenceTables(
        np.array([[0]], np.int32), np.array([3], np.int32), np.array([0, 1], np.int32), 16
    )
    with pytest.raises(ValueError, match=r"got \(128, 64\); attention_backend=.cpu. takes any"):
        checked_backend.paged_latent(*queries, *pools, tables, scale=1.0)

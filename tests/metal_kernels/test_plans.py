"""Work lists cover every key and row once; those of a sequence depend on it alone."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from metal_kernels.kernels import Kernel, KernelSpec
from metal_kernels.limits import HEAD_DIMS, PAGE_SIZES
from metal_kernels.metal import MetalBackend
from metal_kernels.ops import Attention
from metal_kernels.plans import (
    NO_WINDOW,
    DecodePlan,
    GroupSplit,
    HeadSplit,
    PrefillPlan,
    num_tiles,
    page_tables,
    partition_size,
    rounded,
    tile_bytes,
    tile_side,
    upload,
)
from metal_kernels.tables import Plans, SequenceTables
from metal_kernels.writes import page_moves
from tests.emulated import emulated_factory
from tests.emulator import MetalKernel


def tables(sequences: list[tuple[int, int]], page_size: int = 16) -> SequenceTables:
    """Of (tokens before, rows)."""
    contexts = [before + rows for before, rows in sequences]
    return SequenceTables(
        page_tables=np.zeros((len(sequences), -(-max(contexts) // page_size)), np.int32),
        context_lens=np.array(contexts, np.int32),
        query_starts=np.cumsum([0, *(rows for _, rows in sequences)], dtype=np.int32),
        page_size=page_size,
    )


SIZES = sorted({partition_size(kv_heads) for kv_heads in range(1, 129)})


def test_few_kv_heads_have_smaller_partitions_of_whole_pages() -> None:
    assert [partition_size(kv_heads) for kv_heads in (1, 2, 3, 4, 5, 8, 128)] == [
        *(64, 64, 128, 128),
        *(256, 256, 256),
    ]
    assert all(size % page_size == 0 for size in SIZES for page_size in PAGE_SIZES)


def test_a_small_upload_is_padded_with_rows_of_zeros() -> None:
    assert upload([3]).tolist() == [3, 0, 0, 0, 0, 0, 0, 0]
    assert upload(np.ones((1, 3), np.int32)).shape == (3, 3)
    assert upload(np.ones((4, 2), np.int32)).shape == (4, 2)
    assert upload(np.zeros((0, 2), np.int32)).size >= 8
    assert upload(range(9)).dtype == mx.int32


def test_dispatches_have_two_sizes_per_power_of_two() -> None:
    sizes = [rounded(count) for count in range(1, 4097)]
    assert all(count <= size <= max(2, 1.5 * count) for count, size in enumerate(sizes, 1))
    assert sorted(set(sizes)) == [2, 3, *(k << n for n in range(1, 11) for k in (2, 3)), 4096]


def test_a_plan_of_few_sizes_ends_with_partitions_without_keys_and_pages_that_are_not_read() -> (
    None
):
    one = tables([(1100, 1)])
    plan = DecodePlan.from_tables(one, None, 256)
    assert plan.partitions.tolist()[plan.num_partitions :] == [[0, 0, 0, 0]]
    assert plan.starts.tolist()[:2] == [0, plan.num_partitions]
    assert page_tables(one).shape == (1, 96)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("window", [None, 1, 40, 300])
def test_partitions_cover_every_key_that_a_decode_sees_once(window: int | None, size: int) -> None:
    contexts = [1, size - 1, size, size + 1, 2000]
    plan = DecodePlan.from_tables(tables([(context - 1, 1) for context in contexts]), window, size)
    partitions = np.array(plan.partitions)[: plan.num_partitions]
    starts = np.array(plan.starts)
    assert plan.num_partitions == starts[len(contexts)]
    for sequence, context in enumerate(contexts):
        mine = partitions[starts[sequence] : starts[sequence + 1]]
        assert (mine[:, 0] == sequence).all()
        keys = np.concatenate([np.arange(first, end) for _, first, end, _ in mine])
        assert keys.tolist() == list(range(max(0, context - (window or context)), context))
        assert (mine[1:, 1] % size == 0).all()
        assert ((mine[:, 2] - 1) // size == mine[:, 1] // size).all()


def test_a_sequences_partitions_are_the_same_in_any_batch() -> None:
    alone = DecodePlan.from_tables(tables([(699, 1)]), 500, 64)
    among = DecodePlan.from_tables(tables([(3, 1), (699, 1), (5000, 1)]), 500, 64)
    first, end = np.array(among.starts)[1:3]
    mine = np.array(among.partitions)[first:end, 1:]
    assert np.array_equal(mine, np.array(alone.partitions)[: alone.num_partitions, 1:])


@pytest.mark.parametrize("window", [None, 1, 50])
@pytest.mark.parametrize(("group", "side"), [(1, 32), (3, 16), (8, 32), (16, 16)])
def test_tiles_cover_every_line_and_every_key_it_sees(
    group: int, side: int, window: int | None
) -> None:
    sequences = [(0, 1), (0, 40), (90, 3), (200, 65)]
    given = tables(sequences)
    plan = PrefillPlan.of(given, window, group, side)
    tiles = np.array(plan.tiles)[: plan.num_tiles].tolist()
    covered: list[tuple[int, int]] = []
    for sequence, first_row, first_line, lines, position, first_key, end_key, seen in tiles:
        before, rows = sequences[sequence]
        assert (first_row, lines, position) == (
            given.query_starts[sequence],
            rows * group,
            before,
        )
        assert seen == (window or NO_WINDOW)
        for line in range(first_line, min(first_line + side, lines)):
            covered.append((sequence, line))
            at = position + line // group
            assert first_key <= max(0, at - seen + 1)
            assert at < end_key <= before + rows
        first_sees = max(0, position + first_line // group - seen + 1)
        assert first_key == first_sees // 16 * 16, "pages wholly outside the window are skipped"
    assert covered == [(s, n) for s, (_, rows) in enumerate(sequences) for n in range(rows * group)]


def test_a_write_moves_every_row_once_and_whole_pages_as_pages() -> None:
    for seed in range(20):
        random = np.random.default_rng(seed)
        slots = np.arange(16 * 12, dtype=np.int32)
        if seed:
            cuts = np.sort(random.choice(np.arange(1, len(slots)), 2 * seed, replace=False))
            parts = np.split(slots, cuts)
            random.shuffle(parts)  # type: ignore[arg-type]
            slots = np.concatenate(parts[: len(parts) - seed // 4])
        plan = page_moves(slots, 16, Plans())
        written = dict(plan.tokens.tolist())
        for first_row, page in plan.pages.tolist():
            for offset in range(16):
                assert (
                    written.setdefault(first_row + offset, page * 16 + offset) == page * 16 + offset
                ), seed
        assert written == dict(enumerate(slots.tolist())), seed
        assert len(plan.tokens) + 16 * len(plan.pages) == len(slots), seed
        expected = {
            int(slots[row]) // 16
            for row in range(len(slots) - 15)
            if slots[row] % 16 == 0 and (np.diff(slots[row : row + 16]) == 1).all()
        }
        assert set(plan.pages[:, 1].tolist()) == expected, seed


def test_a_tile_fits_for_every_head_dimension() -> None:
    for item_size in [2, 4]:
        for head_dim in HEAD_DIMS:
            side = tile_side(head_dim, item_size)
            assert (
                tile_bytes(head_dim, item_size, side, num_tiles(head_dim, item_size, side))
                <= 32 << 10
            ), (item_size, head_dim)


def test_keys_and_values_have_tiles_of_their_own_where_both_fit() -> None:
    """In half precision up to 192 dimensions: with a tile each, simdgroups wait for one another half as often."""
    for item_size, most in ((2, 192), (4, 112)):
        for dim in HEAD_DIMS:
            tiles = num_tiles(dim, item_size, tile_side(dim, item_size))
            assert tiles == (2 if dim <= most else 1), (item_size, dim)


def test_a_head_that_fits_in_no_tile_is_refused() -> None:
    with pytest.raises(ValueError, match="head dimension 1024"):
        tile_side(1024, 4)


def test_every_head_of_a_group_is_computed() -> None:
    for head_dim in HEAD_DIMS:
        for group in range(1, 100):
            split = HeadSplit.of(group, head_dim)
            assert split.heads * split.parts * split.blocks >= group, head_dim
            assert split.heads * -(-head_dim // 128) * 4 <= 64, "registers of queries and sums"
            assert split.threads <= 256, "an M1 has registers for no more"
            if group <= (16 if head_dim <= 256 else 8):
                assert split.blocks == 1, "keys and values are read once"


def test_every_head_of_a_large_group_is_computed() -> None:
    for head_dim in HEAD_DIMS:
        for group in range(4, 130):
            split = GroupSplit.of(group, head_dim)
            assert 8 * split.parts * split.blocks >= group, head_dim
            assert split.threads <= 256, "an M1 has registers for no more"
            if group <= (32 if head_dim <= 192 else 16):
                assert split.blocks == 1, "keys and values are read once"


@pytest.mark.parametrize(
    ("dtype", "head_dim"), [(mx.float32, 128), (mx.float16, 64), (mx.float16, 512)], ids=str
)
def test_a_tile_uses_as_much_memory_as_the_plan_says(dtype: mx.Dtype, head_dim: int) -> None:
    built: dict[str, Kernel] = {}
    make = emulated_factory()

    def remembering(spec: KernelSpec, source: str) -> Kernel:
        return built.setdefault(spec.name, make(spec, source))

    backend = MetalBackend(remembering)
    pools = [backend.new_pool(2, 1, 16, head_dim, dtype) for _ in range(2)]
    queries = mx.zeros((1, 1, head_dim), dtype)
    backend.paged_prefill(queries, *pools, tables([(0, 1)]), Attention(1.0))
    kernel = built["paged_prefill"]
    assert isinstance(kernel, MetalKernel)
    assert kernel.statistics is not None
    side = tile_side(head_dim, dtype.size)
    tiles = num_tiles(head_dim, dtype.size, side)
    assert kernel.statistics.threadgroup_bytes == tile_bytes(head_dim, dtype.size, side, tiles)

"""MLX's unfused attention over copies, in blocks: exact, within the planned bytes, and only where it was chosen."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, TypeAlias

import mlx.core as mx
import numpy as np
import pytest

from metal_kernels import long_chunks, proof_steps
from metal_kernels.limits import COPY_BYTES, room_for
from metal_kernels.long_chunks import (
    CopiedChunks,
    can_copy,
    counted_copies,
    longest_copied,
    room_copied,
    use_timed,
)
from metal_kernels.ops import Attention
from metal_kernels.reading import evaluate
from metal_kernels.selftest import QUICK_WAYS, why_not_in_place
from metal_kernels.step_ways import StepWay
from metal_kernels.unfused_attention import attention_in_blocks, blocks_of
from tests.emulated import emulated_backend
from tests.metal_kernels.oracle import Case, Paged

_attention = mx.fast.scaled_dot_product_attention


class Calls:
    """MLX's attention; notes the arguments of each call."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.options: list[dict[str, Any]] = []
        # (query heads, rows, positions) of each call
        self.shapes: list[tuple[int, int, int]] = []
        monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", self)

    def __call__(
        self, queries: mx.array, keys: mx.array, values: mx.array, **options: Any
    ) -> mx.array:
        self.shapes.append((*queries.shape[1:3], keys.shape[2]))
        self.options.append(options)
        out: mx.array = _attention(queries, keys, values, **options)
        return out


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return Calls(monkeypatch)


Choose: TypeAlias = Callable[[CopiedChunks | None], None]


@pytest.fixture
def choose(monkeypatch: pytest.MonkeyPatch) -> Choose:
    """Let chunks of head dimensions 64 and 256 attend so, as if that had been timed."""

    def use(chosen: CopiedChunks | None) -> None:
        monkeypatch.setattr(long_chunks, "timed_choices", {})
        for head_dim in (64, 256):
            for dtype in (mx.float16, mx.bfloat16):
                use_timed(head_dim, dtype, chosen)

    return use


@pytest.mark.parametrize(("num_rows", "row_bytes"), [(512, 1000), (259, 4096), (64, 1), (1, 9)])
@pytest.mark.parametrize("block_bytes", [4096, 100_000, 1 << 30])
def test_blocks_are_all_rows_in_order_and_fit(
    num_rows: int, row_bytes: int, block_bytes: int
) -> None:
    blocks = list(blocks_of(num_rows, row_bytes, block_bytes))
    assert (blocks[0][0], blocks[-1][1]) == (0, num_rows)
    assert all(end == first for (_, end), (first, _) in pairwise(blocks))
    rows = [end - first for first, end in blocks]
    assert max(rows) * row_bytes <= block_bytes
    assert max(rows) - min(rows) <= 1
    assert len(blocks) == -(-num_rows // (block_bytes // row_bytes))


def test_a_row_whose_scores_exceed_a_block_is_one() -> None:
    assert list(blocks_of(3, 100, 99)) == [(0, 1), (1, 2), (2, 3)]


OPTIONS: list[dict[str, Any]] = [
    {},
    {"dtype": mx.bfloat16, "key_dim": 256, "value_dim": 256, "group": 3},
    {"window": 21},
    {"window": 21, "is_quantised": True, "page_size": 32, "kv_heads": 1, "group": 4},
    {"window": 1000},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("before", [0, 37])
def test_a_chunk_in_blocks_is_right(
    before: int,
    options: dict[str, Any],
    choose: Choose,
    calls: Calls,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the kernels with every check, beside a shorter chunk of tiles."""
    monkeypatch.setattr(long_chunks, "BLOCK_BYTES", 9000)
    choose(CopiedChunks(40, unfused_heads=6))
    case = Case(((before, 70), (5, 39)), **{"dtype": mx.float16, **options})
    paged = Paged(emulated_backend(check=True), case)
    assert paged.error() <= paged.tolerance
    assert sum(rows for _, rows, _ in calls.shapes) == 70
    assert len(calls.shapes) > 2
    for heads, rows, positions in calls.shapes:
        assert heads * rows * positions * 2 <= 9000
    assert not any(options.get("force_fused") for options in calls.options)


@pytest.mark.parametrize(
    ("window", "seen"), [(None, [55, 70, 85, 100]), (11, [30, 30, 30]), (200, [55, 70, 85, 100])]
)
def test_a_block_sees_positions_up_to_its_last_row_and_from_its_windows_on(
    window: int | None,
    seen: list[int],
    choose: Choose,
    calls: Calls,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of 15 rows if they see 100 positions, and of 20 if copies have only 70."""
    monkeypatch.setattr(long_chunks, "BLOCK_BYTES", 15 * 4 * 100 * 2)
    choose(CopiedChunks(40, unfused_heads=4))
    case = Case(((40, 60),), dtype=mx.float16, window=window)
    paged = Paged(emulated_backend(), case)
    assert paged.error() <= paged.tolerance
    assert [positions for _, _, positions in calls.shapes] == seen


@pytest.mark.parametrize("kind", ["causal", "window"])
def test_scores_are_masked_and_weighted_where_they_lie(kind: str) -> None:
    """So a chunk takes the planned bytes, and not two or three times as many."""
    heads, rows, positions = 16, 128, 4096
    draw = mx.random.key(3)
    queries = mx.random.normal((1, heads, rows, 256), key=draw).astype(mx.float16)
    keys = mx.random.normal((1, 2, positions, 256), key=draw).astype(mx.float16)
    mask: mx.array | str = "causal"
    window = None
    if kind == "window":
        window = positions - rows + 1
        distance = mx.arange(positions - rows, positions)[:, None] - mx.arange(positions)
        mask = (distance >= 0) & (distance < window)
        evaluate(mask)
    evaluate(queries, keys)
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    options = {"scale": 0.1, "mask": mask, "sinks": None, "window": window}
    evaluate(attention_in_blocks(queries, keys, keys, **options))
    taken = mx.get_peak_memory() - before
    planned = positions * CopiedChunks(64, heads).score_bytes(rows, mx.float16)
    outputs = 4 * queries.nbytes
    assert planned / 2 < taken <= planned + outputs


def test_copies_and_scores_have_the_share_of_memory_together(choose: Choose) -> None:
    memory = 16 << 30
    for heads in (8, 16, 32, 64):
        choose(CopiedChunks(64, unfused_heads=heads))
        for rows in (64, 256, 512, 2048):
            longest = longest_copied(rows, 2, 256, mx.bfloat16, memory)
            each = 2 * 2 * 256 * 2 + rows * (heads * 2 + 1)
            assert each * room_for(longest) <= memory // 32 < each * 2 * (longest + 8192)
    choose(CopiedChunks(64))
    assert longest_copied(2048, 2, 256, mx.bfloat16, memory) == 256 << 10


def test_scores_count_as_positions_of_as_many_bytes(
    choose: Choose, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(long_chunks, "total_memory", lambda: 16 << 30)
    chunk = 512, 16_000, 2, 256, mx.bfloat16, None
    choose(CopiedChunks(64))
    assert counted_copies(*chunk) == room_copied(*chunk) == 16_384
    choose(CopiedChunks(64, unfused_heads=16))
    room = room_copied(*chunk)
    assert room == 16_384
    assert (counted_copies(*chunk) - room) * COPY_BYTES == room * 512 * (16 * 2 + 1)
    assert counted_copies(512, 32_000, 2, 256, mx.bfloat16, None) == 0, "the tile kernel reads it"
    assert counted_copies(32, 16_000, 2, 256, mx.bfloat16, None) == 0
    choose(None)
    assert counted_copies(*chunk) == 0


def test_what_is_not_planned_for_or_failed_its_test_is_read_by_tiles(choose: Choose) -> None:
    kind = 256, mx.bfloat16
    choose(CopiedChunks(64, unfused_heads=16))
    assert can_copy(16, *kind, has_sinks=False)
    assert can_copy(8, *kind, has_sinks=False)
    assert not can_copy(17, *kind, has_sinks=False)
    assert not can_copy(16, *kind, has_sinks=True), "they are appended to another copy"
    for way in (StepWay.GATHERED, StepWay.BLOCKS):
        assert not can_copy(16, *kind, has_sinks=False, without={way})
    assert can_copy(16, *kind, has_sinks=False, without={StepWay.ROTATED, StepWay.RECORDED})
    choose(CopiedChunks(64))
    assert can_copy(17, *kind, has_sinks=True, without={StepWay.BLOCKS})
    assert not can_copy(17, *kind, has_sinks=False, without={StepWay.GATHERED})
    choose(None)
    assert not can_copy(16, *kind, has_sinks=False)


@pytest.mark.parametrize(
    ("options", "without"),
    [
        ({"group": 3}, frozenset()),
        ({"has_sinks": True}, frozenset()),
        ({"softcap": 2.0}, frozenset()),
        ({}, frozenset([StepWay.BLOCKS])),
    ],
    ids=["more query heads", "sinks", "softcap", "its self-test failed"],
)
def test_a_chunk_that_is_not_planned_for_is_right_by_tiles(
    options: dict[str, Any], without: frozenset[StepWay], choose: Choose, calls: Calls
) -> None:
    choose(CopiedChunks(16, unfused_heads=4))
    backend = emulated_backend()
    backend.without = without
    paged = Paged(backend, Case(((9, 20),), dtype=mx.float16, **options))
    assert paged.error() <= paged.tolerance
    assert calls.shapes == []


def test_an_answer_does_not_depend_on_the_chunks_beside_it(choose: Choose) -> None:
    choose(CopiedChunks(16, unfused_heads=4))
    backend = emulated_backend()
    paged = Paged(backend, Case(((7, 30), (9, 4), (50, 33)), dtype=mx.float16))
    pools, tables = paged.pools(), paged.tables
    queries = mx.random.normal((67, 4, 64), key=mx.random.key(1)).astype(mx.float16)
    together = backend.paged_prefill(queries, *pools, tables, Attention(0.1))
    alone = type(tables)(
        tables.page_tables[2:], tables.context_lens[2:], np.array([0, 33], np.int32), 16
    )
    answer = backend.paged_prefill(queries[34:], *pools, alone, Attention(0.1))
    assert mx.array_equal(together[34:], answer)


def test_the_proof_of_blocks_computes_several_and_none_fused(calls: Calls) -> None:
    load = QUICK_WAYS[StepWay.BLOCKS]
    assert why_not_in_place(emulated_backend(), load) is None
    assert len(calls.shapes) >= load.steps * proof_steps.NUM_BLOCKS
    assert not any(options.get("force_fused") for options in calls.options)

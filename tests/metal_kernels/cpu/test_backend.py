"""What the CPU backend costs, and that its ways to attend agree."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from metal_kernels.cpu import cascade
from metal_kernels.cpu.backend import CpuBackend
from metal_kernels.tables import SequenceTables

_PAGES, _HEADS, _PAGE_SIZE, _DIM = 4_096, 2, 16, 32


def test_copying_pages_does_not_copy_the_pool() -> None:
    cpu = CpuBackend()
    keys, values = (cpu.new_pool(_PAGES, _HEADS, _PAGE_SIZE, _DIM, mx.float32) for _ in range(2))
    mx.eval(keys, values)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    sources, targets = np.array([1, 2], np.int32), np.array([9, 10], np.int32)
    # Handed over, not lent: a second reference would force mlx to copy.
    pools = [keys, values]
    del keys, values
    pools = list(cpu.copy_pages(pools.pop(0), pools.pop(0), sources, targets, _PAGE_SIZE))
    mx.eval(pools)
    assert mx.get_peak_memory() - before < pools[0].nbytes // 8


@pytest.mark.parametrize("num_runs", [1, 3])
def test_a_decode_copies_no_keys(num_runs: int) -> None:
    num_pages = 1_024
    keys, values = (mx.ones((_HEADS, _PAGES * _PAGE_SIZE, _DIM)) for _ in range(2))
    pages = np.arange(num_pages, dtype=np.int32)
    pages += 2 * (pages * num_runs // num_pages)
    tables = SequenceTables(
        pages[None], np.array([num_pages * _PAGE_SIZE], np.int32), np.array([0, 1], np.int32), 16
    )
    queries = mx.ones((1, 6, _DIM))
    mx.eval(queries, keys, values)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    found = CpuBackend().paged_decode(queries, keys, values, tables, scale=0.2)
    assert mx.allclose(found, mx.ones((1, 6, _DIM)), atol=1e-5).item()
    read = num_pages * _PAGE_SIZE * _HEADS * _DIM * 4
    assert mx.get_peak_memory() - before < read, "it copied them"


@pytest.mark.parametrize("num_runs", [1, 2, 12, 48])
@pytest.mark.parametrize("window", [None, 500])
def test_a_decode_gets_the_same_however_its_pages_are_scattered(
    num_runs: int, window: int | None
) -> None:
    """Runs that are long enough are read where they are; of shorter ones the keys are copied."""
    draw = np.random.default_rng(0)
    num_pages, context = 400, 400 * _PAGE_SIZE - 5
    keys, values = (
        mx.array(draw.normal(size=(_HEADS, 500 * _PAGE_SIZE, _DIM)).astype(np.float32))
        for _ in range(2)
    )
    queries = mx.array(draw.normal(size=(1, 6, _DIM)).astype(np.float32))
    table = np.arange(num_pages, dtype=np.int32)
    table = (table + 2 * (table * num_runs // num_pages))[None]
    at = np.arange(0 if window is None else context - window, context)
    seen = mx.array(table[0, at // _PAGE_SIZE] * _PAGE_SIZE + at % _PAGE_SIZE)
    expected = mx.fast.scaled_dot_product_attention(
        queries[:, :, None], keys[:, seen][None], values[:, seen][None], scale=0.2
    )
    tables = SequenceTables(
        table, np.array([context], np.int32), np.array([0, 1], np.int32), _PAGE_SIZE
    )
    found = CpuBackend().paged_decode(queries, keys, values, tables, scale=0.2, window=window)
    assert np.abs(np.array(found) - np.array(expected)[:, :, 0]).max() < 2e-6


def test_decodes_attended_together_get_what_each_gets_alone() -> None:
    """Few scores, which mlx's kernel takes, and many, which are written out."""
    draw = np.random.default_rng(0)
    shape = (_HEADS, 128 * _PAGE_SIZE, _DIM)
    keys, values = (mx.array(draw.normal(size=shape).astype(np.float32)) for _ in range(2))
    for contexts in ([3, 20, 9], [300, 150, 16, 77]):
        num_rows, num_pages = len(contexts), -(-max(contexts) // _PAGE_SIZE)
        pages = draw.permutation(128)[: num_rows * num_pages].reshape(num_rows, num_pages)
        tables = SequenceTables(
            page_tables=pages.astype(np.int32),
            context_lens=np.array(contexts, np.int32),
            query_starts=np.arange(num_rows + 1, dtype=np.int32),
            page_size=_PAGE_SIZE,
        )
        queries = mx.array(draw.normal(size=(num_rows, 6, _DIM)).astype(np.float32))
        together, alone = (
            CpuBackend(max_gathered_rows=rows).paged_decode(
                queries, keys, values, tables, scale=0.2
            )
            for rows in (1 << 14, 0)
        )
        assert np.abs(np.array(together) - np.array(alone)).max() < 2e-6


@pytest.mark.parametrize(
    ("positions", "stride", "is_gathered"),
    [(1_000, 1, True), (1_100, 1, False), (1_100, 2, True), (2_000, 2, True), (2_100, 2, False)],
)
def test_decodes_whose_pages_are_scattered_are_gathered_up_to_longer_contexts(
    positions: int, stride: int, is_gathered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 2 heads. One by one, each run of pages would take products of its own."""
    gathered = []
    take = mx.take

    def watched_take(array: mx.array, index: mx.array, **options: Any) -> mx.array:
        if index.ndim == 3:  # of all sequences, not of one
            gathered.append(index)
        return take(array, index, **options)

    monkeypatch.setattr(mx, "take", watched_take)
    num_pages = -(-positions // _PAGE_SIZE)
    page_tables = stride * np.arange(2 * num_pages, dtype=np.int32).reshape(2, num_pages)
    contexts, starts = np.full(2, positions, np.int32), np.arange(3, dtype=np.int32)
    pools = [mx.zeros((_HEADS, 4 * num_pages * _PAGE_SIZE, _DIM)) for _ in range(2)]
    CpuBackend().paged_decode(
        mx.zeros((2, 6, _DIM)),
        *pools,
        SequenceTables(page_tables, contexts, starts, _PAGE_SIZE),
        scale=1.0,
    )
    assert bool(gathered) == is_gathered


def test_decodes_with_a_shared_prefix_attend_in_groups_wherever_their_own_pages_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every one of them has a break behind the prefix."""
    attended = []
    attend = cascade.attend

    def watched_attend(*args: Any, **options: Any) -> mx.array:
        attended.append(args)
        return attend(*args, **options)

    monkeypatch.setattr(cascade, "attend", watched_attend)
    page_tables = np.tile(np.arange(80, dtype=np.int32), (4, 1))
    page_tables[:, -1] = [90, 92, 94, 96]
    contexts, starts = np.full(4, 80 * _PAGE_SIZE, np.int32), np.arange(5, dtype=np.int32)
    pools = [mx.zeros((_HEADS, 100 * _PAGE_SIZE, _DIM)) for _ in range(2)]
    tables = SequenceTables(page_tables, contexts, starts, _PAGE_SIZE)
    CpuBackend().paged_decode(mx.zeros((4, 6, _DIM)), *pools, tables, scale=1.0)
    assert len(attended) == 1

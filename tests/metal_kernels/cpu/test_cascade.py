"""Rows with a shared prefix attend together, and get what each would get alone."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from metal_kernels.cpu import cascade
from metal_kernels.cpu.backend import CpuBackend
from metal_kernels.tables import SequenceTables

PAGE = 16
HEADS, KV_HEADS, DIM = 6, 2, 8


def tables(rows: list[tuple[list[int], int]]) -> SequenceTables:
    """One decode for each (pages, context)."""
    page_tables = np.zeros((len(rows), max(len(pages) for pages, _ in rows)), np.int32)
    for table, (pages, _) in zip(page_tables, rows, strict=True):
        table[: len(pages)] = pages
    contexts = np.array([context for _, context in rows], np.int32)
    return SequenceTables(page_tables, contexts, np.arange(len(rows) + 1, dtype=np.int32), PAGE)


SHARED = list(range(10, 20))  # 160 positions
OTHERS = list(range(30, 39))
MIXED = [
    ([*SHARED, 2], 165),
    ([*OTHERS, 1], 150),
    ([5, 6, 40], 47),
    ([*SHARED, 3, 21], 190),
    ([*OTHERS, 22], 145),
    ([*SHARED, 0], 161),
]


def test_rows_are_grouped_by_what_they_share() -> None:
    found = cascade.group_rows(tables(MIXED))
    assert [group.rows for group in found.groups] == [[0, 3, 5], [1, 4]]
    assert found.rest_rows == [2]
    group = found.groups[0]
    assert group.shared.bounds == ((160, 320),)
    # Page 2 from its slot 32 on, pages 3 and 21, page 0; then each row's first slot.
    assert group.own.tolist() == [
        [*range(32, 37), *[160] * 25],
        [*range(48, 64), *range(336, 350)],
        [0, *[160] * 29],
    ]
    assert (np.array(group.unseen)[:, 0] == 0).sum(axis=1).tolist() == [5, 30, 1]
    assert found.groups[1].own.shape == (2, 6)


@pytest.mark.parametrize(
    "rows",
    [
        pytest.param([([1, 2], 20), ([1, 3], 20)], id="little is shared"),
        pytest.param([([*range(9)], 140), ([*range(20, 29)], 140)], id="nothing is shared"),
        pytest.param(
            [
                ([*SHARED, *range(40, 140)], 1_760),
                *(([*SHARED, 140 + n], 165) for n in range(9)),
            ],
            id="one has much of its own",
        ),
        pytest.param([(SHARED, 160)], id="a single row"),
    ],
)
def test_rows_that_share_too_little_are_not_grouped(rows: list[tuple[list[int], int]]) -> None:
    assert cascade.group_rows(tables(rows)).groups == []


def test_the_page_that_a_row_writes_is_not_shared() -> None:
    """A context that ends with the shared pages has its newest position in the last of them."""
    found = cascade.group_rows(tables([(SHARED, 160), ([*SHARED, 7], 170)]))
    [group] = found.groups
    assert group.shared.bounds == ((160, 304),)
    assert group.own[:, 0].tolist() == [304, 304]


@pytest.mark.parametrize("tile_scores", [1, 1 << 10, 1 << 18])
def test_every_row_gets_what_it_gets_alone(
    tile_scores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In tiles of one kv head and eight rows, and in one tile."""
    monkeypatch.setattr("metal_kernels.cpu.written_out.LARGE_TILE_SCORES", tile_scores)
    backend = CpuBackend(max_gathered_rows=0)
    mx.random.seed(3)
    keys, values = (mx.random.normal((KV_HEADS, 160 * PAGE, DIM)) for _ in range(2))
    rows = [*MIXED, *(([*SHARED, 50 + n], 161 + n) for n in range(14))]
    queries = mx.random.normal((len(rows), HEADS, DIM))
    together = backend.paged_decode(queries, keys, values, tables(rows), scale=0.3)
    alone = [
        backend.paged_decode(queries[at : at + 1], keys, values, tables([row]), scale=0.3)
        for at, row in enumerate(rows)
    ]
    np.testing.assert_allclose(np.array(together), np.array(mx.concatenate(alone)), atol=2e-6)


def test_unwritten_slots_are_not_read() -> None:
    written = np.zeros(160 * PAGE, bool)
    for pages, context in MIXED:
        position = np.arange(context)
        written[np.array(pages)[position // PAGE] * PAGE + position % PAGE] = True
    pool = np.where(written[None, :, None], np.float32(1), np.float32(np.nan))
    pool = mx.array(np.broadcast_to(pool, (KV_HEADS, len(written), DIM)))
    queries = mx.ones((len(MIXED), HEADS, DIM))
    backend = CpuBackend(max_gathered_rows=0)
    output = backend.paged_decode(queries, pool, pool, tables(MIXED), scale=1.0)
    np.testing.assert_allclose(np.array(output), 1, atol=1e-6)

"""How decodes are computed on a CPU: in which groups, at what cost, and that all ways agree."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import pytest

from metal_kernels import mlx_attention
from metal_kernels.ops import Attention
from metal_kernels.tables import SequenceTables
from metal_kernels.x86 import decodes
from metal_kernels.x86.backend import X86Backend
from metal_kernels.x86.decodes import Decodes

pytestmark = pytest.mark.usefixtures("compiled")

_PAGES, _HEADS, _PAGE_SIZE, _DIM = 4_096, 2, 16, 32
POOL = mx.zeros((_HEADS, 512 * _PAGE_SIZE, _DIM))
PREFIX = list(range(100, 120))  # 320 positions


def tables(sequences: Sequence[tuple[Sequence[int], int]]) -> SequenceTables:
    """Of (pages, context) of each."""
    page_tables = np.zeros((len(sequences), max(len(pages) for pages, _ in sequences)), np.int32)
    for row, (pages, _) in zip(page_tables, sequences, strict=True):
        row[: len(pages)] = pages
    return SequenceTables(
        page_tables,
        np.array([context for _, context in sequences], np.int32),
        np.arange(len(sequences) + 1, dtype=np.int32),
        _PAGE_SIZE,
    )


def grouped(
    sequences: Sequence[tuple[Sequence[int], int]],
    window: int | None = None,
    copied_per_product: int = 0,
) -> list[list[int]]:
    """The rows of each group."""
    found = Decodes.from_tables(tables(sequences), window, POOL, copied_per_product)
    return [group.rows for group in found.groups]


def test_rows_with_a_shared_prefix_are_a_group_and_others_are_alone() -> None:
    sequences = [
        ([*PREFIX, 200], 330),
        (range(20), 320),
        ([*PREFIX, 210, 211], 350),
        ([*PREFIX[:3], *range(300, 317)], 310),
    ]
    assert grouped(sequences[:3]) == [[0, 2], [1]]
    assert grouped(sequences) == [[0], [2], [3], [1]], "one that shares less parts all of them"


def test_rows_whose_own_parts_are_longer_than_what_they_share_are_alone() -> None:
    assert grouped([([7, 20, 21], 48), ([7, 30, 31], 48)]) == [[0], [1]]
    assert grouped([([7, 8, 21], 48), ([7, 8, 31], 48)]) == [[0, 1]]


def test_a_window_that_begins_after_the_prefix_shares_nothing() -> None:
    sequences = [([*PREFIX, 200], 330), ([*PREFIX, 210], 325)]
    assert grouped(sequences, window=400) == [[0, 1]]
    assert grouped(sequences, window=327) == [[0], [1]]


def test_short_sequences_are_gathered_and_long_ones_are_not() -> None:
    short = [(range(10 * row, 10 * row + 10), 160) for row in range(16)]
    long = [(range(30 * row, 30 * row + 30), 480) for row in range(4)]
    per_product = 4 * 320 * _HEADS * _DIM // 3
    assert grouped(short, copied_per_product=per_product) == [list(range(16))]
    assert grouped(long, copied_per_product=per_product) == [[0], [1], [2], [3]]


def test_a_sequence_in_many_short_runs_is_gathered() -> None:
    per_product = 64 * _HEADS * _DIM
    assert (
        Decodes.from_tables(tables([(range(40), 640)]), None, POOL, per_product).groups[0].own
        is None
    )
    scattered = Decodes.from_tables(tables([(range(0, 80, 2), 640)]), None, POOL, per_product)
    assert scattered.groups[0].own is not None


def test_copies_take_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decodes, "MAX_GATHERED", 5 * 160 * _HEADS * _DIM)
    short = [(range(10 * row, 10 * row + 10), 160) for row in range(12)]
    assert [len(rows) for rows in grouped(short, copied_per_product=1 << 30)] == [5, 5, 2]
    prefixed = [([*PREFIX, *range(200 + 10 * row, 210 + 10 * row)], 480) for row in range(12)]
    assert [len(rows) for rows in grouped(prefixed)] == [5, 5, 2]


@pytest.mark.parametrize("num_runs", [1, 3])
def test_a_decode_copies_no_keys(num_runs: int) -> None:
    num_pages = 1_024
    keys, values = (mx.ones((_HEADS, _PAGES * _PAGE_SIZE, _DIM)) for _ in range(2))
    pages = np.arange(num_pages, dtype=np.int32)
    pages += 2 * (pages * num_runs // num_pages)
    one = tables([(pages.tolist(), num_pages * _PAGE_SIZE)])
    queries = mx.ones((1, 6, _DIM))
    mx.eval(queries, keys, values)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    found = X86Backend().paged_decode(queries, keys, values, one, Attention(0.2))
    assert mx.allclose(found, mx.ones((1, 6, _DIM)), atol=1e-5).item()
    read = num_pages * _PAGE_SIZE * _HEADS * _DIM * 4
    assert mx.get_peak_memory() - before < read, "it copied them"


def drawn_pools() -> list[mx.array]:
    draw = np.random.default_rng(0)
    return [
        mx.array(draw.normal(size=(_HEADS, 512 * _PAGE_SIZE, _DIM)).astype(np.float32))
        for _ in range(2)
    ]


def alone(
    queries: mx.array, pools: Sequence[mx.array], all_of: SequenceTables, attention: Attention
) -> np.ndarray:
    """Each row over copies of what it sees, by mlx's own attention."""
    answers = []
    for row, context in enumerate(all_of.context_lens.tolist()):
        first = max(0, context - (attention.window or context))
        seen = mx.array(all_of.slots(row, np.arange(first, context)))
        keys, values = (pool[:, seen][None] for pool in pools)
        answers.append(
            mlx_attention.attend(queries[None, row, :, None], keys, values, attention)[:, :, 0]
        )
    return np.array(mx.concatenate(answers))


@pytest.mark.parametrize("num_runs", [1, 2, 12, 48])
@pytest.mark.parametrize("window", [None, 500])
def test_a_decode_gets_the_same_however_its_pages_are_scattered(
    num_runs: int, window: int | None
) -> None:
    """Runs that are long enough are read where they are; of shorter ones the keys are copied."""
    pools, queries = drawn_pools(), mx.random.normal((1, 6, _DIM), key=mx.random.key(0))
    table = np.arange(400)
    one = tables([((table + 2 * (table * num_runs // 400)).tolist(), 400 * _PAGE_SIZE - 5)])
    attention = Attention(0.2, window)
    found = X86Backend().paged_decode(queries, *pools, one, attention)
    assert np.abs(np.array(found) - alone(queries, pools, one, attention)).max() < 2e-6


@pytest.mark.parametrize("few_scores", [0, 1 << 30], ids=["written out", "mlx's kernel"])
@pytest.mark.parametrize("copied_per_product", [0, 1 << 30], ids=["joined", "gathered"])
@pytest.mark.parametrize("window", [None, 100])
def test_mlx_and_what_is_written_out_agree_with_sinks(
    monkeypatch: pytest.MonkeyPatch, copied_per_product: int, few_scores: int, window: int | None
) -> None:
    monkeypatch.setattr(decodes, "FEW_SCORES", few_scores)
    pools, queries = drawn_pools(), mx.random.normal((3, 6, _DIM), key=mx.random.key(0))
    all_of = tables([([*PREFIX, 200], 330), ([3, 9, 4], 37), ([5], 1)])
    sinks, attention = mx.array([0.0, 1.0, -1.0, 2.0, 0.5, -2.0]), Attention(0.2, window)
    found = X86Backend(copied_per_product).paged_decode(queries, *pools, all_of, attention, sinks)
    for row in range(3):
        one = tables([(all_of.page_tables[row].tolist(), int(all_of.context_lens[row]))])
        first = max(0, int(one.context_lens[0]) - (window or _PAGES))
        seen = mx.array(one.slots(0, np.arange(first, int(one.context_lens[0]))))
        keys, values = (pool[:, seen][None] for pool in pools)
        wanted = mlx_attention.attend(
            queries[None, row, :, None], keys, values, Attention(0.2), sinks
        )
        assert np.abs(np.array(found[row]) - np.array(wanted[0, :, 0])).max() < 2e-6


@pytest.mark.parametrize("copied_per_product", [0, 1 << 30], ids=["joined", "gathered"])
@pytest.mark.parametrize("window", [None, 100])
def test_decodes_attended_together_get_what_each_gets_alone(
    copied_per_product: int, window: int | None
) -> None:
    """Two groups with prefixes of their own, and rows that share nothing."""
    pools, queries = drawn_pools(), mx.random.normal((7, 6, _DIM), key=mx.random.key(0))
    other = list(range(30, 45))
    all_of = tables(
        [
            ([*PREFIX, 200], 330),
            ([*other, 201, 205], 260),
            ([3, 9, 4], 37),
            ([*PREFIX, 202, 203], 352),
            ([*other, 210], 241),
            ([*PREFIX, 204], 321),
            ([5], 1),
        ]
    )
    attention = Attention(0.2, window)
    backend = X86Backend(copied_per_product)
    found = backend.paged_decode(queries, *pools, all_of, attention)
    assert np.abs(np.array(found) - alone(queries, pools, all_of, attention)).max() < 2e-6

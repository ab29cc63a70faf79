"""The reference answers as float64 numpy does, and its writes touch only what they should."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from metal_kernels import SequenceTables, select_backend
from metal_kernels.cpu import backend as reference

REFERENCE = select_backend("cpu")
SlotsOf = Callable[[mx.array], np.ndarray]


def test_attention_over_pages_is_attention_over_plain_arrays(
    case: Any, paged: Callable[..., Any]
) -> None:
    found = paged(REFERENCE, case)
    assert found.error() <= found.tolerance


def test_decodes_are_right_gathered_or_one_by_one(
    Case: Any, paged: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few short contexts are gathered; with a limit of 0 none are."""
    lengths = ((0, 1), (15, 1), (16, 1), (52, 1))
    for options in ({}, {"has_sinks": True}, {"dtype": mx.float16, "is_scattered": False}):
        found = [paged(REFERENCE, Case(lengths, 16, group=4, **options)) for _ in range(2)]
        answers = []
        for limit, one in zip((reference._GATHERED_ROWS, 0), found, strict=True):
            monkeypatch.setattr(reference, "_GATHERED_ROWS", limit)
            assert one.error() <= one.tolerance
            # Whether rows share a beginning is looked up as well; these do not.
            answers.append([plan for plan in one.tables._plans if plan != "cascade"])
        assert answers[0] == ["gathered"]
        assert answers[1] == [(sequence, 0) for sequence in range(4)]
        monkeypatch.undo()


def test_a_sequence_gets_the_same_answer_alone_and_among_others(
    Case: Any, paged: Callable[..., Any]
) -> None:
    several = paged(REFERENCE, Case(((0, 17), (20, 9), (40, 1)), window=12))
    queries = mx.random.normal((27, 4, 64), key=mx.random.key(1))
    k_pool, v_pool = several.pools()
    together = REFERENCE.paged_prefill(
        queries, k_pool, v_pool, several.tables, scale=0.1, window=12
    )
    for sequence, first, last in several.tables.queries():
        alone = SequenceTables(
            several.tables.page_tables[sequence : sequence + 1],
            several.tables.context_lens[sequence : sequence + 1],
            np.array([0, last - first], np.int32),
            16,
        )
        answer = REFERENCE.paged_prefill(
            queries[first:last], k_pool, v_pool, alone, scale=0.1, window=12
        )
        assert mx.array_equal(answer, together[first:last])


def test_a_decode_with_several_rows_of_a_sequence_is_refused(
    Case: Any, paged: Callable[..., Any]
) -> None:
    found = paged(REFERENCE, Case(((3, 2),)))
    k_pool, v_pool = found.pools()
    with pytest.raises(ValueError, match="one row per sequence"):
        REFERENCE.paged_decode(mx.zeros((2, 4, 64)), k_pool, v_pool, found.tables, scale=1.0)


def filled_pools(dtype: mx.Dtype) -> tuple[mx.array, mx.array]:
    """Two pools of 6 pages of 16 slots, 3 heads, with numbers in every slot."""
    mx.random.seed(5)
    pools = []
    for head_dim in (8, 4):
        empty = REFERENCE.new_pool(6, 3, 16, head_dim, dtype)
        pools.append(mx.random.normal(empty.shape).astype(dtype))
    mx.eval(pools)
    return pools[0], pools[1]


def rows_of(count: int, head_dim: int, dtype: mx.Dtype) -> mx.array:
    return mx.random.normal((count, 3, head_dim), key=mx.random.key(9)).astype(dtype)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize(
    "slots",
    [
        [0],
        [95],
        [15, 16],
        [31, 30, 29],
        list(range(16, 48)),
        [5, 6, 7, 90, 91, 40, 41, 42, 0],
        [],
    ],
    ids=["first", "last", "over_a_page", "backwards", "pages", "mixed", "none"],
)
def test_a_write_is_bit_exact_and_leaves_every_other_slot(
    slots: list[int], dtype: mx.Dtype, slots_of: SlotsOf
) -> None:
    pools = filled_pools(dtype)
    keys, values = (rows_of(len(slots), dim, dtype) for dim in (8, 4))
    expected = [slots_of(pool).copy() for pool in pools]
    for pool, rows in zip(expected, (keys, values), strict=True):
        bits = np.array(rows.view(mx.uint16 if dtype.size == 2 else mx.uint32))
        pool[slots] = bits.reshape(len(slots), *pool.shape[1:])
    written = REFERENCE.write_kv(keys, values, *pools, np.array(slots, np.int32))
    for found, wanted in zip(written, expected, strict=True):
        assert np.array_equal(slots_of(found), wanted)


def test_what_has_no_number_is_written_bit_by_bit(slots_of: SlotsOf) -> None:
    pools = filled_pools(mx.float32)
    special = np.array([np.nan, np.inf, -np.inf, -0.0, 1e-45, 3e38, 1.0, 2.0], np.float32)
    keys = mx.array(np.broadcast_to(special, (2, 3, 8)))
    k_pool, _ = REFERENCE.write_kv(
        keys, rows_of(2, 4, mx.float32), *pools, np.array([3, 50], np.int32)
    )
    assert np.array_equal(slots_of(k_pool)[[3, 50]], np.array(keys.view(mx.uint32)))


def test_rows_written_one_by_one_or_all_at_once_make_the_same_pool(slots_of: SlotsOf) -> None:
    slots = np.array([4, 5, 6, 31, 32, 33, 90], np.int32)
    keys, values = rows_of(7, 8, mx.float16), rows_of(7, 4, mx.float16)
    whole = REFERENCE.write_kv(keys, values, *filled_pools(mx.float16), slots)
    pools = filled_pools(mx.float16)
    for row in range(7):
        at = slice(row, row + 1)
        pools = REFERENCE.write_kv(keys[at], values[at], *pools, slots[at])
    for one, other in zip(whole, pools, strict=True):
        assert np.array_equal(slots_of(one), slots_of(other))


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
def test_copied_pages_are_bit_equal_and_others_stay(dtype: mx.Dtype, slots_of: SlotsOf) -> None:
    pools = filled_pools(dtype)
    expected = [slots_of(pool).copy() for pool in pools]
    for pool in expected:
        pool[0:16], pool[80:96], pool[32:48] = pool[48:64].copy(), pool[16:32], pool[48:64].copy()
    sources, targets = np.array([3, 1, 3], np.int32), np.array([0, 5, 2], np.int32)
    copied = REFERENCE.copy_pages(*pools, sources, targets, 16)
    for found, wanted in zip(copied, expected, strict=True):
        assert np.array_equal(slots_of(found), wanted)


def test_a_new_pool_holds_its_slots_and_no_numbers(slots_of: SlotsOf) -> None:
    pool = REFERENCE.new_pool(4, 3, 32, 8, mx.bfloat16)
    assert pool.dtype == mx.bfloat16
    assert slots_of(pool).shape == (128, 3, 8)
    assert not slots_of(pool).any()

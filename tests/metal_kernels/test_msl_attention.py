"""The kernels' attention is float64 numpy's, for every shape, dtype and option.

The full product of dtypes, head dimensions, page sizes, groups and options is marked `long`, and so
is a selection in which each pair of values meets. Every run takes the half of it, with each value
(and runs it with every run-time check).
All unused slots hold NaN, and page tables are padded with a page that does not exist.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from metal_kernels.limits import HEAD_DIMS, PAGE_SIZES
from metal_kernels.metal import DTYPES, MetalBackend
from metal_kernels.ops import Attention
from metal_kernels.plans import partition_size
from metal_kernels.tables import SequenceTables
from tests.metal_kernels.oracle import CASES, IMAGES, Case, Paged

GROUPS = (1, 4, 8)
WINDOWS = (None, 70)
SOFTCAPS = (None, 2.0)
SINKS = (False, True)
AXES = (DTYPES, HEAD_DIMS, PAGE_SIZES, GROUPS, WINDOWS, SOFTCAPS, SINKS)
NAMES = ("dtype", "head_dim", "page_size", "group", "window", "softcap", "has_sinks")
PRODUCT = list(itertools.product(*AXES))

Values = tuple[Any, ...]
Sequences = Callable[[int], tuple[tuple[int, int], ...]]


def pairs(values: Values) -> set[tuple[int, int, Any, Any]]:
    numbered = enumerate(values)
    return {(i, j, a, b) for (i, a), (j, b) in itertools.combinations(numbered, 2)}


def covering() -> list[Values]:
    """A few of the product in which every two values of two axes meet; greedy and deterministic."""
    missing = set().union(*map(pairs, PRODUCT))
    candidates = [(values, pairs(values)) for values in PRODUCT[::5]]
    chosen = []
    while missing:
        values, covered = max(candidates, key=lambda c: len(c[1] & missing))
        if not covered & missing:
            candidates = [(values, pairs(values)) for values in PRODUCT]
            continue
        missing -= covered
        chosen.append(values)
    return chosen


def name_of(values: Values) -> str:
    dtype, head_dim, page_size, group, window, softcap, has_sinks = values
    words = [
        str(dtype).removeprefix("mlx.core."),
        f"d{head_dim}",
        f"page{page_size}",
        f"gqa{group}",
    ]
    words += ["window"] if window else []
    words += ["softcap"] if softcap else []
    words += ["sinks"] if has_sinks else []
    return "-".join(words)


COVERING = covering()


def quarter(first: int) -> pytest.MarkDecorator:
    """Every fourth of them in every run, from the `first` on; the others are long."""
    return pytest.mark.parametrize(
        "values",
        [
            pytest.param(values, marks=() if n % 4 == first else pytest.mark.long)
            for n, values in enumerate(COVERING)
        ],
        ids=name_of,
    )


def decodes(page_size: int) -> tuple[tuple[int, int], ...]:
    """Contexts around a page's size, and one of two partitions, both in a window of 70."""
    contexts = (1, page_size - 1, page_size, page_size + 1, partition_size(2) + 19)
    return tuple((context - 1, 1) for context in contexts)


def chunks(page_size: int) -> tuple[tuple[int, int], ...]:
    """Chunks without a context before them, starting and ending inside pages, and beyond a window."""
    return ((0, 1), (0, page_size + 1), (page_size // 2, page_size), (page_size + 3, 5), (100, 3))


def few_chunks(page_size: int) -> tuple[tuple[int, int], ...]:
    """The same with half the work."""
    return ((0, 1), (0, page_size + 1), (page_size - 3, 7), (100, 3))


def case_of(sequences: Sequences, values: Values) -> Case:
    dtype, head_dim, page_size, group, window, softcap, has_sinks = values
    return Case(
        sequences(page_size),
        page_size,
        group=group,
        key_dim=head_dim,
        value_dim=head_dim,
        dtype=dtype,
        window=window,
        softcap=softcap,
        has_sinks=has_sinks,
    )


def test_the_selection_has_every_pair_of_values() -> None:
    met = set().union(*map(pairs, COVERING))
    for (i, one), (j, other) in itertools.combinations(enumerate(AXES), 2):
        assert {(i, j, a, b) for a in one for b in other} <= met, (NAMES[i], NAMES[j])
    assert len(COVERING) < 40


def test_half_of_the_selection_has_every_value() -> None:
    for axis, *met in zip(AXES, *COVERING[::4], *COVERING[2::4], strict=True):
        assert set(axis) == set(met)


@quarter(2)
def test_decodes_are_right_and_pass_every_check(
    values: Values, checked_backend: MetalBackend
) -> None:
    found = Paged(checked_backend, case_of(decodes, values))
    assert found.error() <= found.tolerance


@pytest.mark.slow
@quarter(0)
def test_chunks_are_right_and_pass_every_check(
    values: Values, checked_backend: MetalBackend
) -> None:
    found = Paged(checked_backend, case_of(chunks, values))
    assert found.error() <= found.tolerance


@pytest.mark.parametrize("case", IMAGES, ids=str)
def test_rows_of_an_image_see_all_of_it(case: Case, checked_backend: MetalBackend) -> None:
    found = Paged(checked_backend, case)
    assert found.error() <= found.tolerance


@pytest.mark.long
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("sequences", [decodes, few_chunks], ids=["decodes", "chunks"])
def test_every_combination_is_right(
    sequences: Sequences, head_dim: int, dtype: mx.Dtype, fast_backend: MetalBackend
) -> None:
    combinations = [values for values in PRODUCT if values[:2] == (dtype, head_dim)]
    for values in combinations[:: 5 if head_dim == 512 else 1]:  # these take a minute each
        found = Paged(fast_backend, case_of(sequences, values))
        assert found.error() <= found.tolerance, name_of(values)


def test_other_layouts_are_right(fast_backend: MetalBackend) -> None:
    """Consecutive pages, and a single kv head."""
    for case in CASES:
        if case.key_dim == case.value_dim and (case.kv_heads == 1 or not case.is_scattered):
            found = Paged(fast_backend, case)
            assert found.error() <= found.tolerance, str(case)


@pytest.mark.slow
def test_groups_of_any_size_are_right(checked_backend: MetalBackend) -> None:
    for group in [2, 3, 5, 7, 9, 11, 16, 17, 23]:
        for sequences in [((40, 1), (2, 1)), ((0, 9), (30, 3))]:
            found = Paged(checked_backend, Case(sequences, group=group, has_sinks=True))
            assert found.error() <= found.tolerance, (group, sequences)


@pytest.mark.parametrize("group", [9, 11, 16, 23])
def test_groups_of_any_size_are_right_without_matrices(
    group: int, backend_without_matrices: MetalBackend
) -> None:
    found = Paged(backend_without_matrices, Case(((40, 1), (2, 1)), group=group, has_sinks=True))
    assert found.error() <= found.tolerance


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [192, 256, 512])
def test_large_groups_of_large_heads_are_right(
    head_dim: int, checked_backend: MetalBackend, backend_without_matrices: MetalBackend
) -> None:
    """Several simdgroups share the heads, and merge them in several rounds."""
    sizes = {"key_dim": head_dim, "value_dim": head_dim}
    for backend in (checked_backend, backend_without_matrices):
        found = Paged(backend, Case(((40, 1), (2, 1)), group=16, **sizes))
        assert found.error() <= found.tolerance


@pytest.mark.long
def test_groups_in_8_bits_are_right(checked_backend: MetalBackend) -> None:
    """By matrices, whose columns are not all used; a window begins and ends inside pages."""
    for at, head_dim in enumerate(HEAD_DIMS):
        for group in [4, 5, 17] if head_dim == 64 else [(4, 5, 17)[at % 3]]:
            sizes = {"key_dim": head_dim, "value_dim": head_dim, "dtype": mx.float16}
            case = Case(((40, 1), (2, 1)), group=group, window=21, is_quantised=True, **sizes)
            found = Paged(checked_backend, case)
            assert found.error() <= found.tolerance, (head_dim, group)


@pytest.mark.slow
def test_windows_of_any_size_are_right(checked_backend: MetalBackend) -> None:
    for window in [1, 15, 16, 17, 255, 256, 257, 600, 10_000]:
        for sequences in (((699, 1), (511, 1), (255, 1), (9, 1)), ((500, 3), (14, 20))):
            found = Paged(checked_backend, Case(sequences, group=1, window=window))
            assert found.error() <= found.tolerance, window


@pytest.mark.slow
@pytest.mark.parametrize("pool_dtype", [*DTYPES, mx.int8], ids=str)
def test_rows_as_models_pass_them_are_written_and_attended_over_alike(
    pool_dtype: mx.Dtype, checked_backend: MetalBackend
) -> None:
    """(rows, heads, 1, head_dim): removing the axis would add an operation to every step's graph."""
    dtype = mx.bfloat16 if pool_dtype == mx.int8 else pool_dtype
    keys, values, queries = (
        mx.random.normal((2, heads, 1, 64), key=mx.random.key(seed)).astype(dtype)
        for seed, heads in enumerate((2, 2, 4))
    )
    tables = SequenceTables(
        np.array([[1], [2]], np.int32), np.array([6, 1], np.int32), np.arange(3, dtype=np.int32), 16
    )
    found = []
    for with_axis in (True, False):
        rows = [each if with_axis else each.squeeze(2) for each in (keys, values, queries)]
        pools = [checked_backend.new_pool(4, 2, 16, 64, pool_dtype) for _ in range(2)]
        checked_backend.write_kv(*rows[:2], *pools, np.array([21, 32], np.int32))
        output = checked_backend.paged_decode(rows[2], *pools, tables, Attention(0.125))
        assert output.shape == rows[2].shape
        checked_backend.settle()
        held = [np.array(pool.view(mx.uint8)) for pool in pools]
        found.append([np.array(output.astype(mx.float32)).ravel(), *held])
    for one, other in zip(*found, strict=True):
        assert one.any()
        assert np.array_equal(one, other)


def test_many_partitions_are_right(fast_backend: MetalBackend) -> None:
    contexts = tuple((partition_size(1) * n + extra, 1) for n, extra in ((2, -1), (2, 0), (40, 7)))
    found = Paged(fast_backend, Case(contexts, kv_heads=1, has_sinks=True))
    assert found.error() <= found.tolerance


@pytest.mark.parametrize(("scale", "tolerance"), [(1e-6, 3e-6), (30.0, 1e-4)])
def test_scores_near_zero_and_far_apart_are_right(
    scale: float, tolerance: float, checked_backend: MetalBackend
) -> None:
    """Scores of a thousand keep four decimal places in float32."""
    for sequences in (((299, 1), (3, 1)), ((20, 30),)):
        found = Paged(checked_backend, Case(sequences, has_sinks=True))
        found.scale = scale
        assert found.error() <= tolerance


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [None, 40])
def test_a_decode_is_bit_identical_alone_and_in_any_batch(
    window: int | None, dtype: mx.Dtype, fast_backend: MetalBackend
) -> None:
    contexts = (1, 700, 16, 257, 33, 256, 90)
    sequences = tuple((context - 1, 1) for context in contexts)
    found = Paged(fast_backend, Case(sequences, group=4, dtype=dtype, has_sinks=True))
    pools, tables = found.pools(), found.tables
    queries = mx.random.normal((7, 8, 64), key=mx.random.key(3)).astype(dtype)
    sinks = mx.random.normal((8,), key=mx.random.key(4)).astype(dtype)

    def decode(order: list[int]) -> mx.array:
        some = SequenceTables(
            tables.page_tables[order],
            tables.context_lens[order],
            np.arange(len(order) + 1, dtype=np.int32),
            tables.page_size,
        )
        rows = queries[mx.array(order)]
        return fast_backend.paged_decode(rows, *pools, some, Attention(0.125, window=window), sinks)

    alone = [decode([row]) for row in range(7)]
    for order in ([0, 1, 2, 3, 4, 5, 6], [6, 0, 1], [3, 3, 1], [5, 4, 2, 0], [2, 6]):
        together = decode(order)
        for place, row in enumerate(order):
            assert mx.array_equal(together[place], alone[row][0]), (order, row)


@pytest.mark.parametrize("rows", [1, 40])
def test_pages_outside_the_window_are_not_read(rows: int, checked_backend: MetalBackend) -> None:
    """They may belong to another request; here they do not even exist."""
    found = Paged(checked_backend, Case(((600, rows),), window=33))
    expected = found.answer()
    first = (600 + rows - 1) - (rows - 1) - 33 + 1  # the first row's first key
    page_tables = found.tables.page_tables.copy()
    page_tables[0, : first // 16] = 2**30
    found.tables = dataclasses.replace(found.tables, page_tables=page_tables)
    vars(found.tables)["highest_page"] = 0  # what the check of the arguments would refuse
    assert (found.answer() == expected).all()


def test_a_view_of_rows_is_attended_like_a_copy(checked_backend: MetalBackend) -> None:
    """A mixed step passes a part of its rows, and models pass transposed heads."""
    found = Paged(checked_backend, Case(((20, 1), (3, 1)), has_sinks=True))
    rows = mx.random.normal((4, 4, 64), key=mx.random.key(1))
    pools = found.pools()
    expected = checked_backend.paged_decode(
        mx.array(rows[2:]), *pools, found.tables, Attention(0.1)
    )
    turned = mx.contiguous(rows.swapaxes(1, 2)).swapaxes(1, 2)
    for view in (rows[2:], turned[2:]):
        answer = checked_backend.paged_decode(view, *pools, found.tables, Attention(0.1))
        assert mx.array_equal(answer, expected)

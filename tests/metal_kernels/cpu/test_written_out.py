"""Attention in tiles is that of mlx's own kernel, and of float64."""

from __future__ import annotations

import itertools

import mlx.core as mx
import numpy as np
import pytest

from metal_kernels.cpu import written_out
from metal_kernels.cpu.attention import attend_fused
from metal_kernels.cpu.written_out import (
    attend_row_written_out,
    attend_rows_written_out,
    attend_written_out,
)
from tests.metal_kernels.cpu.arrays import arrays

# From a single tile to several of rows (64 at most), of a few rows, and of one kv head each.
SIZES = [(1, 1), (1, 90), (7, 7), (7, 90), (64, 90), (65, 65), (150, 200), (20, 3_000), (9, 12_000)]


@pytest.mark.parametrize(
    ("rows", "positions", "window", "has_sinks"),
    [
        (rows, positions, window, has_sinks)
        for (rows, positions), window, has_sinks in itertools.product(
            SIZES, [None, 20], [False, True]
        )
    ],
)
def test_it_equals_fused(rows: int, positions: int, window: int | None, has_sinks: bool) -> None:
    if window:  # the caller cuts off what no row sees
        positions = min(positions, rows + window - 1)
    given = arrays(rows, positions)
    sinks = mx.random.normal((6,), key=mx.random.key(9)) if has_sinks else None
    fused = attend_fused(*given, scale=0.2, window=window, sinks=sinks)
    found = attend_written_out(*given, scale=0.2, window=window, sinks=sinks)
    assert np.abs(np.array(fused) - np.array(found)).max() < 2e-6


def test_a_softcap_bounds_the_scores_of_every_tile() -> None:
    queries, keys, values = arrays(150, 150)
    found = attend_written_out(queries * 20, keys, values, scale=0.2, softcap=3.0)
    q, k, v = (np.array(array[0], np.float64) for array in (queries, keys, values))
    k, v = np.repeat(k, 3, 0), np.repeat(v, 3, 0)
    weights = np.exp(3 * np.tanh(4 * q @ k.swapaxes(1, 2) / 3)) * np.tri(150)
    assert np.abs(found[0] - weights @ v / weights.sum(-1, keepdims=True)).max() < 2e-5


def test_no_row_sees_what_comes_after_it() -> None:
    queries, keys, values = arrays(150, 150)
    before = attend_written_out(queries, keys, values, scale=0.2)
    is_last = mx.arange(150)[:, None] >= 100
    changed = [mx.where(is_last, np.nan, array) for array in (keys, values)]
    after = attend_written_out(queries, *changed, scale=0.2)
    # A tile's masked positions are numbers in a pool; before the tile of row 64 nothing is read.
    assert mx.array_equal(before[:, :, :64], after[:, :, :64])


@pytest.mark.parametrize("has_sinks", [False, True])
def test_rows_with_keys_of_their_own_are_each_as_alone(has_sinks: bool) -> None:
    contexts = (1, 17, 50)
    queries = mx.random.normal((3, 6, 32), key=mx.random.key(0))
    keys = mx.random.normal((2, 3, 50, 32), key=mx.random.key(1))
    values = mx.random.normal((2, 3, 50, 16), key=mx.random.key(2))
    sinks = mx.random.normal((6,), key=mx.random.key(3)) if has_sinks else None
    is_seen = np.arange(50) < np.array(contexts)[:, None]
    unseen = mx.array(np.where(is_seen, np.float32(0), np.float32(-np.inf)))[:, None, None]
    found = attend_rows_written_out(queries, keys, values, scale=0.2, unseen=unseen, sinks=sinks)
    for row, context in enumerate(contexts):
        alone = attend_fused(
            queries[None, row, :, None],
            keys[None, :, row, :context],
            values[None, :, row, :context],
            scale=0.2,
            sinks=sinks,
        )
        assert np.abs(np.array(alone[0, :, 0]) - np.array(found[row])).max() < 2e-6


@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("ends", [(), (1,), (32, 64), (7, 8, 100, 299)], ids=str)
def test_a_row_attends_over_runs_as_over_all_of_them(
    ends: tuple[int, ...], has_sinks: bool
) -> None:
    queries, keys, values = arrays(1, 300)
    sinks = mx.random.normal((6,), key=mx.random.key(9)) if has_sinks else None
    fused = attend_fused(queries, keys, values, scale=0.2, sinks=sinks)
    bounds = list(itertools.pairwise([0, *ends, 300]))
    runs = [[array[0, :, begin:end] for begin, end in bounds] for array in (keys, values)]
    found = attend_row_written_out(queries[0, :, 0], *runs, scale=0.2, sinks=sinks)
    assert found.shape == (1, 6, values.shape[-1])
    assert np.abs(np.array(fused[:, :, 0]) - np.array(found)).max() < 2e-6


def test_scores_of_any_size_give_numbers() -> None:
    queries, keys, values = arrays(2, 40)
    for factor in (1e4, 1e-6):
        answer = attend_written_out(queries * factor, keys, values, scale=1.0)
        assert np.isfinite(np.array(answer)).all()


def test_long_chunks_are_computed_in_several_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    tiles: list[tuple[int, ...]] = []
    exp2 = written_out.exp2

    def counted(scores: mx.array, largest: mx.array) -> mx.array:
        tiles.append(scores.shape)
        return exp2(scores, largest)

    monkeypatch.setattr(written_out, "exp2", counted)
    mx.eval(attend_written_out(*arrays(200, 3_000), scale=0.2))
    assert sum(kv_heads * rows for kv_heads, _, rows, _ in tiles) == 2 * 200
    assert max(np.prod(shape) for shape in tiles) <= 1 << 18

"""Attention in tiles is that of mlx's own kernel, and of float64."""

from __future__ import annotations

import itertools

import mlx.core as mx
import numpy as np
import pytest

from metal_kernels import mlx_attention
from metal_kernels.ops import Attention
from metal_kernels.x86 import written_out
from metal_kernels.x86.written_out import attend_written_out
from tests.metal_kernels.x86.arrays import arrays

pytestmark = pytest.mark.usefixtures("compiled")

# From a single tile to several of rows (64 at most), of a few rows, and of one kv head each.
SIZES = [(1, 1), (1, 90), (7, 7), (7, 90), (64, 90), (65, 65), (150, 200), (20, 3_000), (9, 12_000)]


def test_it_equals_fused() -> None:
    for rows, positions, window, has_sinks in [
        (rows, positions, window, has_sinks)
        for (rows, positions), window, has_sinks in itertools.product(
            SIZES, [None, 20], [False, True]
        )
    ]:
        if window:  # the caller cuts off what no row sees
            positions = min(positions, rows + window - 1)
        given = arrays(rows, positions)
        sinks = mx.random.normal((6,), key=mx.random.key(9)) if has_sinks else None
        attention = Attention(0.2, window)
        expected, found = (
            np.array(attend(*given, attention, sinks))
            for attend in (mlx_attention.attend, attend_written_out)
        )
        assert np.abs(expected - found).max() < 2e-6, rows


def test_a_softcap_bounds_the_scores_of_every_tile() -> None:
    queries, keys, values = arrays(150, 150)
    found = attend_written_out(queries * 20, keys, values, Attention(0.2, softcap=3.0))
    q, k, v = (np.array(array[0], np.float64) for array in (queries, keys, values))
    k, v = np.repeat(k, 3, 0), np.repeat(v, 3, 0)
    weights = np.exp(3 * np.tanh(4 * q @ k.swapaxes(1, 2) / 3)) * np.tri(150)
    assert np.abs(found[0] - weights @ v / weights.sum(-1, keepdims=True)).max() < 2e-5


def test_no_row_sees_what_comes_after_it() -> None:
    queries, keys, values = arrays(150, 150)
    before = attend_written_out(queries, keys, values, Attention(0.2))
    is_last = mx.arange(150)[:, None] >= 100
    changed = [mx.where(is_last, np.nan, array) for array in (keys, values)]
    after = attend_written_out(queries, *changed, Attention(0.2))
    # A tile's masked positions are numbers in a pool; before the tile of row 64 nothing is read.
    assert mx.array_equal(before[:, :, :64], after[:, :, :64])


def test_scores_of_any_size_give_numbers() -> None:
    queries, keys, values = arrays(2, 40)
    for factor in (1e4, 1e-6):
        answer = attend_written_out(queries * factor, keys, values, Attention(1.0))
        assert np.isfinite(np.array(answer)).all()


def test_long_chunks_are_computed_in_several_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    tiles: list[tuple[int, ...]] = []
    exp2 = written_out.exp2

    def counted(scores: mx.array, largest: mx.array) -> mx.array:
        tiles.append(scores.shape)
        return exp2(scores, largest)

    monkeypatch.setattr(written_out, "exp2", counted)
    mx.eval(attend_written_out(*arrays(200, 3_000), Attention(0.2)))
    assert sum(kv_heads * rows for kv_heads, _, rows, _ in tiles) == 2 * 200
    assert max(np.prod(shape) for shape in tiles) <= 1 << 18

"""Attention over plain arrays: written out and fused give the same."""

from __future__ import annotations

import itertools

import mlx.core as mx
import numpy as np
import pytest

from metal_kernels.cpu.attention import MANY_SCORES, attend, attend_fused, attend_written_out


def arrays(
    rows: int, positions: int, dtype: mx.Dtype = mx.float32
) -> tuple[mx.array, mx.array, mx.array]:
    """Queries of 6 heads, keys and values of 2."""
    shapes = (1, 6, rows, 32), (1, 2, positions, 32), (1, 2, positions, 16)
    queries, keys, values = (
        mx.random.normal(shape, key=mx.random.key(index)).astype(dtype)
        for index, shape in enumerate(shapes)
    )
    return queries, keys, values


def causal(rows: int, positions: int, window: int | None = None) -> mx.array:
    """(rows, positions): 0 for what a row sees, else minus infinity."""
    row = np.arange(positions - rows, positions)[:, None]
    column = np.arange(positions)
    is_seen = (column <= row) & (column > row - (window or positions))
    return mx.array(np.where(is_seen, np.float32(0), np.float32(-np.inf)))


@pytest.mark.parametrize(
    ("rows", "positions", "window", "has_sinks"),
    [
        (rows, positions, window, has_sinks)
        for (rows, positions), window, has_sinks in itertools.product(
            [(1, 1), (1, 90), (7, 7), (7, 90), (64, 90)], [None, 20], [False, True]
        )
    ],
)
def test_written_out_equals_fused(
    rows: int, positions: int, window: int | None, has_sinks: bool
) -> None:
    if window:  # the caller cuts off what no row sees
        positions = min(positions, rows + window - 1)
    given = arrays(rows, positions)
    sinks = mx.random.normal((6,), key=mx.random.key(9)) if has_sinks else None
    fused = attend_fused(*given, scale=0.2, window=window, sinks=sinks)
    unseen = causal(rows, positions, window)
    written_out = attend_written_out(*given, scale=0.2, unseen=unseen, sinks=sinks)
    assert np.abs(np.array(fused) - np.array(written_out)).max() < 2e-6


@pytest.mark.parametrize("rows", [60, 61])
def test_many_scores_are_written_out_on_a_cpu(rows: int) -> None:
    given = arrays(rows, 90)
    with mx.stream(mx.cpu):
        found = attend(*given, scale=0.2)
        fused = attend_fused(*given, scale=0.2)
        written_out = attend_written_out(*given, scale=0.2, unseen=causal(rows, 90))
    assert not mx.array_equal(fused, written_out)
    is_written_out = mx.default_device() == mx.cpu and 6 * rows * 90 >= MANY_SCORES
    assert mx.array_equal(found, written_out if is_written_out else fused)


def test_many_scores_of_two_bytes_are_fused() -> None:
    given = arrays(61, 90, mx.bfloat16)
    assert mx.array_equal(attend(*given, scale=0.2), attend_fused(*given, scale=0.2))


def test_scores_of_any_size_give_numbers() -> None:
    queries, keys, values = arrays(2, 40)
    for factor in (1e4, 1e-6):
        answer = attend_written_out(queries * factor, keys, values, scale=1.0, unseen=None)
        assert np.isfinite(np.array(answer)).all()

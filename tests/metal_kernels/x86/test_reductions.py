"""The largest number and the sum of each row, of few and of many numbers, against numpy."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from metal_kernels.x86.reductions import row_max, row_sum

SHAPES = [
    (3, 5),
    (1, 7),
    (2, 3, 1, 40),
    (66_000, 1),
    (40_000, 3),
    (8, 2_000, 4),
    (300, 257),
    (2, 4, 66, 1_003),
]


def test_rows_are_reduced() -> None:
    for shape in SHAPES:
        numbers = np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32)
        x = mx.array(numbers)
        assert np.array_equal(np.array(row_max(x)), numbers.max(-1, keepdims=True)), shape
        expected = numbers.astype(np.float64).sum(-1, keepdims=True)
        assert np.allclose(np.array(row_sum(x)), expected, rtol=1e-5, atol=1e-4), shape


def test_the_largest_is_found_in_every_column() -> None:
    for column in [0, 256, 257, 511, 512, 770, 1_000, 1_002]:
        numbers = np.full((70, 1_003), -np.inf, np.float32)
        numbers[:, column] = np.arange(70)
        assert np.array_equal(np.array(row_max(mx.array(numbers)))[:, 0], np.arange(70)), column


def test_half_precision_is_summed_by_mlx() -> None:
    x = mx.ones((70, 1_000), mx.bfloat16)
    assert row_sum(x).dtype == mx.bfloat16
    assert np.array_equal(np.array(row_sum(x).astype(mx.float32)), np.full((70, 1), 1_000))

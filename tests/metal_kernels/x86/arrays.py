"""Queries, keys and values for attention over plain arrays."""

from __future__ import annotations

import mlx.core as mx


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

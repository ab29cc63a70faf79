"""Quantised rows: a slot's keys or values of one head, in 8 bits. `ops.py` states the format.

The specification in plain mlx, which the reference and the `cpu` backend compute with; the Metal kernels
write the same bytes.
"""

from __future__ import annotations

import mlx.core as mx

DTYPE = mx.int8  # dtype of a quantised pool
SCALE_SIZE = 4  # bytes at the end of a row
_HIGHEST = 127
# A row with nothing above it is zeros: its scale would be too small for float32, and a GPU takes such
# numbers for 0.
_LOWEST = 2.0**-119


def row_width(head_dim: int, dtype: mx.Dtype) -> int:
    """Elements of a row in a pool of this dtype."""
    return head_dim + SCALE_SIZE if dtype == DTYPE else head_dim


def head_dim_of(width: int, dtype: mx.Dtype) -> int:
    """Head dimension of rows of this width in a pool of this dtype."""
    return width - (SCALE_SIZE if dtype == DTYPE else 0)


def quantise(rows: mx.array) -> mx.array:
    """Quantise (..., head_dim) of any float dtype to (..., head_dim + 4) int8."""
    numbers = rows.astype(mx.float32)
    highest = mx.abs(numbers).max(axis=-1, keepdims=True)
    scale = mx.where(highest >= _LOWEST, highest / _HIGHEST, 0.0)
    scale = mx.where(mx.isfinite(highest), scale, mx.nan)
    values = mx.where(scale > 0, mx.round(numbers / scale), 0.0)  # round: half to even
    return mx.concatenate([values.astype(DTYPE), scale.view(DTYPE)], axis=-1)


def dequantise(rows: mx.array) -> mx.array:
    """Dequantise (..., head_dim + 4) int8 to (..., head_dim) float32."""
    scale = rows[..., -SCALE_SIZE:].view(mx.float32)
    return rows[..., :-SCALE_SIZE].astype(mx.float32) * scale


def stored(rows: mx.array, pool: mx.array) -> mx.array:
    """Convert rows to the format of `pool`."""
    return rows if rows.dtype == pool.dtype else quantise(rows)


def loaded(rows: mx.array, dtype: mx.Dtype) -> mx.array:
    """Convert a pool's rows to the argument of `write_kv`, in `dtype` if quantised."""
    return dequantise(rows).astype(dtype) if rows.dtype == DTYPE else rows

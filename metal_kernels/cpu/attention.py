"""Attention over plain arrays: mlx's fused one, or written out where that is faster or needed."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from metal_kernels.cpu.written_out import attend_written_out

# From this many scores on, writing out is faster on a CPU; below, its dozen operations cost more
# than they save. CPU time of one x86 thread, 12 query and 4 kv heads of 64 dimensions, relative to
# mlx's own kernel: one row over 256 positions 1.07, over 512 0.88, over 2,048 0.66; 32 over 32 0.66.
MANY_SCORES = 6_144


def attend(
    queries: mx.array,  # (1, heads, rows, head_dim), the last positions of the keys
    keys: mx.array,  # (1, kv_heads, positions, head_dim)
    values: mx.array,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: mx.array | None = None,
) -> mx.array:
    """(1, heads, rows, value_dim), causal. The caller cuts off positions outside every window."""
    num_scores = queries.shape[1] * queries.shape[2] * keys.shape[2]
    if softcap is None and not is_faster_written_out(num_scores, queries.dtype):
        return attend_fused(queries, keys, values, scale=scale, window=window, sinks=sinks)
    return attend_written_out(
        queries, keys, values, scale=scale, window=window, softcap=softcap, sinks=sinks
    )


def attend_fused(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    *,
    scale: float,
    window: int | None = None,
    sinks: mx.array | None = None,
) -> mx.array:
    """As `attend`, by mlx's own kernel, which has no softcap."""
    mask = _mask(queries.shape[2], keys.shape[2], window)
    return mx.fast.scaled_dot_product_attention(
        queries, keys, values, scale=scale, mask=mask, sinks=sinks
    )


def is_faster_written_out(num_scores: int, dtype: mx.Dtype, many: int = MANY_SCORES) -> bool:
    """Of all query heads and rows; the dtype of the queries."""
    return num_scores >= many and is_float32_on_cpu(dtype)


def is_float32_on_cpu(dtype: mx.Dtype) -> bool:
    """Where writing out can be faster at all."""
    return bool(mx.default_device() == mx.cpu and dtype == mx.float32)


def _mask(rows: int, positions: int, window: int | None) -> mx.array | str | None:
    """None where every row sees every position."""
    if rows == 1:
        return None
    if window is None or positions <= window:
        return "causal"
    row = np.arange(positions - rows, positions)[:, None]
    column = np.arange(positions)
    return mx.array((column <= row) & (column > row - window))

"""Attention over plain arrays: mlx's fused one, or written out where that is not enough.

Written out for scores with a softcap (Gemma 2), for which the fused one has no option, and on a
CPU for many scores, because the softmax of mlx's Linux wheel is scalar: 32 rows over 2,500
positions in 12 heads take 28.9 ms of one x86 thread with it and 14.3 ms without.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from metal_kernels.cpu.exponential import LOG2_E, exp2, tanh

# From this many scores on, writing out is faster on a CPU; below, its dozen operations cost more
# than they save.
MANY_SCORES = 32_768


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
    rows, positions = queries.shape[2], keys.shape[2]
    if softcap is None and not has_many_scores(queries, positions):
        return attend_fused(queries, keys, values, scale=scale, window=window, sinks=sinks)
    unseen = unseen_by(rows, positions, window) if rows > 1 else None
    return attend_written_out(
        queries, keys, values, scale=scale, unseen=unseen, softcap=softcap, sinks=sinks
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
    """As `attend`, by mlx's own kernel."""
    mask = _mask(queries.shape[2], keys.shape[2], window)
    return mx.fast.scaled_dot_product_attention(
        queries, keys, values, scale=scale, mask=mask, sinks=sinks
    )


def attend_written_out(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    *,
    scale: float,
    unseen: mx.array
    | None,  # (rows, positions) or (1, heads, rows, positions): added to the scores
    # in powers of 2, minus infinity where a row does not see a position
    softcap: float | None = None,
    sinks: mx.array | None = None,
) -> mx.array:
    """As `attend`, but each row sees what `unseen` says. In float32, with powers of two."""
    _, heads, rows, head_dim = queries.shape
    kv_heads, positions = keys.shape[1:3]
    group = heads // kv_heads * rows  # all queries of a kv head are rows of one product
    factor = scale * (LOG2_E if softcap is None else 1 / softcap)
    grouped = (queries * factor).reshape(1, kv_heads, group, head_dim)
    scores = (grouped @ keys.swapaxes(-1, -2)).astype(mx.float32)
    scores = scores.reshape(1, heads, rows, positions)
    if softcap is not None:
        scores = softcap * LOG2_E * tanh(scores)
    if unseen is not None:
        scores = scores + unseen
    largest = scores.max(axis=-1, keepdims=True)
    if sinks is not None:
        sinks = LOG2_E * sinks.astype(mx.float32).reshape(1, heads, 1, 1)
        largest = mx.maximum(largest, sinks)
    weights = exp2(scores - largest)
    total = weights.sum(axis=-1, keepdims=True)
    if sinks is not None:
        total = total + exp2(sinks - largest)
    grouped = weights.astype(values.dtype).reshape(1, kv_heads, group, positions)
    output = (grouped @ values).reshape(1, heads, rows, values.shape[-1])
    return (output / total).astype(queries.dtype)


def has_many_scores(queries: mx.array, positions: int) -> bool:
    """Whether writing out is faster."""
    _, heads, rows, _ = queries.shape
    is_on_cpu = mx.default_device() == mx.cpu and queries.dtype == mx.float32
    return bool(is_on_cpu and heads * rows * positions >= MANY_SCORES)


def _mask(rows: int, positions: int, window: int | None) -> mx.array | str | None:
    """None where every row sees every position."""
    if rows == 1:
        return None
    if window is None or positions <= window:
        return "causal"
    return mx.array(_is_seen(rows, positions, window))


def unseen_by(rows: int, positions: int, window: int | None = None) -> mx.array:
    """(rows, positions) float32 to add to scores: 0, or minus infinity.

    A choice (mx.where) costs as much as an exponential on a CPU, an addition a fortieth.
    """
    is_seen = _is_seen(rows, positions, window)
    return mx.array(np.where(is_seen, np.float32(0), np.float32(-np.inf)))


def _is_seen(rows: int, positions: int, window: int | None) -> npt.NDArray[np.bool_]:
    row = np.arange(positions - rows, positions)[:, None]
    column = np.arange(positions)[None]
    return (column <= row) & (column > row - (window or positions))

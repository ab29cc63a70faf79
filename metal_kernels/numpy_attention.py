"""Attention of one sequence in numpy: the exact answer, computed without any device.

The check-up and the self-test compare kernels with it. It does not use mlx, whose own products can
be the less exact side: on an M5 mlx multiplies float32 matrices in TF32, with 10 bits of mantissa.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
_HIGHEST = np.float32(127)


def attend(queries: Floats, keys: Floats, values: Floats) -> Floats:
    """Return the answer of the sequence's last rows, causal: (rows, heads, value_dim).

    queries: (rows, heads, head_dim), for the last positions of the sequence
    keys: (length, kv_heads, head_dim); values: (length, kv_heads, value_dim)
    """
    rows, heads, head_dim = queries.shape
    length, kv_heads, _ = keys.shape
    # One product per kv head: the query heads of a group are rows of the same matrix.
    grouped = queries.reshape(rows, kv_heads, heads // kv_heads, head_dim).transpose(1, 2, 0, 3)
    scores = grouped.reshape(kv_heads, -1, head_dim) @ keys.transpose(1, 2, 0)
    scores = scores.reshape(kv_heads, -1, rows, length) * np.float32(head_dim**-0.5)
    is_seen = np.arange(length) <= np.arange(length - rows, length)[:, None]
    scores = np.where(is_seen, scores, np.float32(-np.inf))
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    answer: Floats = weights.reshape(kv_heads, -1, length) @ values.transpose(1, 0, 2)
    answer = answer.reshape(kv_heads, -1, rows, values.shape[2]).transpose(2, 0, 1, 3)
    return answer.reshape(rows, heads, -1)


def in_8_bits(rows: Floats) -> Floats:
    """Quantise rows, which are neither zeros nor infinite, as a pool stores them."""
    scales = np.abs(rows).max(axis=-1, keepdims=True) / _HIGHEST
    held: Floats = np.rint(rows / scales) * scales
    return held


def unpacked(rows: npt.NDArray[np.int8]) -> Floats:
    """Dequantise the rows of a quantised pool."""
    scales = np.ascontiguousarray(rows[..., -4:]).view(np.float32)
    held: Floats = rows[..., :-4].astype(np.float32) * scales
    return held

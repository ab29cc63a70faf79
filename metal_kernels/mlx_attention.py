"""mlx's own attention over plain arrays, on any device."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from metal_kernels.ops import Attention
from metal_kernels.tables import IntArray


def attend(
    queries: mx.array,  # (1, heads, rows, head_dim), the last positions of the keys
    keys: mx.array,  # (1, kv_heads, positions, head_dim)
    values: mx.array,
    attention: Attention,
    sinks: mx.array | None = None,
    ends: IntArray | None = None,
) -> mx.array:
    """Return (1, heads, rows, value_dim), causal but for rows that see up to their `ends`.

    The caller cuts off positions outside every window. `ends` count from the first of these positions.
    """
    if attention.softcap is not None:
        return _attend_capped(queries, keys, values, attention, sinks, ends)
    mask = _mask(queries.shape[2], keys.shape[2], attention.window, ends)
    return mx.fast.scaled_dot_product_attention(
        queries, keys, values, scale=attention.scale, mask=mask, sinks=sinks
    )


def attend_gathered(
    queries: mx.array,  # (sequences, heads, head_dim)
    keys: mx.array,  # (kv_heads, sequences, positions, head_dim): each sequence has its own
    values: mx.array,
    unseen: mx.array,  # (sequences, 1, 1, positions): 0, or minus infinity
    attention: Attention,
    sinks: mx.array | None = None,
) -> mx.array:
    """Return (sequences, heads, value_dim): one row of each sequence."""
    return mx.fast.scaled_dot_product_attention(
        queries[:, :, None],
        keys.swapaxes(0, 1),
        values.swapaxes(0, 1),
        scale=attention.scale,
        mask=unseen.astype(queries.dtype),
        sinks=sinks,
    )[:, :, 0]


def attend_latents(
    q_latent: mx.array,  # (rows, heads, latent_dim), the last positions of the latents
    q_rope: mx.array,  # (rows, heads, rope_dim), scaled
    latents: mx.array,  # (positions, latent_dim): keys and values at once
    keys: mx.array,  # (positions, rope_dim)
    *,
    scale: float,
) -> mx.array:
    """Return (rows, heads, latent_dim), causal, of one sequence.

    The scores of the rotated keys are added like a mask, as mlx-lm does.
    """
    rows = len(q_latent)
    added = q_rope[None].swapaxes(1, 2) @ keys.T
    if rows > 1:
        added = mx.where(_seen(rows, len(latents), None), added, -mx.inf)
    output = mx.fast.scaled_dot_product_attention(
        q_latent[None].swapaxes(1, 2),
        latents[None, None],
        latents[None, None],
        scale=scale,
        mask=added,
    )
    return output.squeeze(0).swapaxes(0, 1)


def attend_gathered_latents(
    q_latent: mx.array,  # (sequences, heads, latent_dim)
    q_rope: mx.array,
    latents: mx.array,  # (1, sequences, positions, latent_dim)
    keys: mx.array,  # (1, sequences, positions, rope_dim)
    unseen: mx.array,  # (sequences, 1, 1, positions): 0, or minus infinity
    *,
    scale: float,
) -> mx.array:
    """Return (sequences, heads, latent_dim): one row of each sequence over its own latents."""
    latents, keys = latents.swapaxes(0, 1), keys.swapaxes(0, 1)
    added = q_rope[:, :, None] @ keys.swapaxes(-1, -2) + unseen.astype(q_rope.dtype)
    return mx.fast.scaled_dot_product_attention(
        q_latent[:, :, None], latents, latents, scale=scale, mask=added
    )[:, :, 0]


def _attend_capped(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    attention: Attention,
    sinks: mx.array | None,
    ends: IntArray | None,
) -> mx.array:
    """Attend with a softcap, which mlx's kernel lacks, written out in float32."""
    scale, window, softcap = attention
    assert softcap is not None
    _, heads, rows, head_dim = queries.shape
    kv_heads, positions = keys.shape[1:3]
    grouped = queries.astype(mx.float32).reshape(kv_heads, -1, rows, head_dim)
    scores = grouped @ keys[0, :, None].astype(mx.float32).swapaxes(-1, -2)
    scores = softcap * mx.tanh(scores * (scale / softcap))
    scores = mx.where(_seen(rows, positions, window, ends), scores, -mx.inf)
    total = mx.logsumexp(scores, axis=-1, keepdims=True)
    # Part of the sum, without a value.
    if sinks is not None:
        total = mx.logaddexp(total, sinks.astype(mx.float32).reshape(kv_heads, -1, 1, 1))
    output = mx.exp(scores - total) @ values[0, :, None].astype(mx.float32)
    return output.reshape(1, heads, rows, -1).astype(queries.dtype)


def _mask(
    rows: int, positions: int, window: int | None, ends: IntArray | None
) -> mx.array | str | None:
    """Return the mask; None if every row sees every position."""
    if rows == 1:
        return None
    if ends is not None:
        return _seen(rows, positions, window, ends)
    if window is None or positions <= window:
        return "causal"
    return _seen(rows, positions, window)


def _seen(rows: int, positions: int, window: int | None, ends: IntArray | None = None) -> mx.array:
    """Return (rows, positions): whether each of the last rows sees each position."""
    row = np.arange(positions - rows, positions)[:, None]
    column = np.arange(positions)
    last = row if ends is None else ends[:, None] - 1
    return mx.array((column <= last) & (column > row - (window or positions)))

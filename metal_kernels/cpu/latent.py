"""Attention over latents, which are keys and values at once, over plain arrays.

Where they are few, the scores of the rotated keys are added like a mask, as mlx-lm does.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from metal_kernels.cpu.attention import is_faster_written_out
from metal_kernels.cpu.written_out import attend_written_out


def attend(
    q_latent: mx.array,  # (rows, heads, latent_dim), the last positions of the latents
    q_rope: mx.array,  # (rows, heads, rope_dim), scaled
    latents: mx.array,  # (positions, latent_dim)
    keys: mx.array,  # (positions, rope_dim)
    *,
    scale: float,
) -> mx.array:
    """(rows, heads, latent_dim), causal, of one sequence."""
    num_scores = q_latent.shape[0] * q_latent.shape[1] * len(latents)
    if is_faster_written_out(num_scores, q_latent.dtype):
        # One product of both; with few scores, copying the latents beside their keys costs more.
        queries = mx.concatenate([q_latent * scale, q_rope], axis=-1)[None].swapaxes(1, 2)
        both = mx.concatenate([latents, keys], axis=-1)[None, None]
        output = attend_written_out(queries, both, latents[None, None], scale=1.0)
    else:
        rows = len(q_latent)
        added = q_rope[None].swapaxes(1, 2) @ keys.T
        if rows > 1:
            added = added + _unseen(rows, len(latents)).astype(added.dtype)
        output = mx.fast.scaled_dot_product_attention(
            q_latent[None].swapaxes(1, 2),
            latents[None, None],
            latents[None, None],
            scale=scale,
            mask=added,
        )
    return output.squeeze(0).swapaxes(0, 1)


def attend_gathered(
    q_latent: mx.array,  # (sequences, heads, latent_dim)
    q_rope: mx.array,
    latents: mx.array,  # (sequences, positions, latent_dim)
    keys: mx.array,  # (sequences, positions, rope_dim)
    unseen: mx.array,  # (sequences, 1, 1, positions): 0, or minus infinity
    *,
    scale: float,
) -> mx.array:
    """(sequences, heads, latent_dim): one row of each sequence over latents of its own."""
    latents, keys = latents[:, None], keys[:, None]
    added = q_rope[:, :, None] @ keys.swapaxes(-1, -2) + unseen.astype(q_rope.dtype)
    return mx.fast.scaled_dot_product_attention(
        q_latent[:, :, None], latents, latents, scale=scale, mask=added
    )[:, :, 0]


def _unseen(rows: int, positions: int) -> mx.array:
    """(rows, positions) float32: 0, or minus infinity where a row does not see a position."""
    return mx.array(np.triu(np.full((rows, positions), -np.inf, np.float32), positions - rows + 1))

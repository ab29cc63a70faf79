"""Attention over latents, which are keys and values at once, over plain arrays.

The scores of the rotated keys are computed first and added like a mask, as mlx-lm does.
"""

from __future__ import annotations

import mlx.core as mx

from metal_kernels.cpu.attention import attend_written_out, has_many_scores, unseen_by
from metal_kernels.cpu.exponential import LOG2_E


def attend(
    q_latent: mx.array,  # (rows, heads, latent_dim), the last positions of the latents
    q_rope: mx.array,  # (rows, heads, rope_dim), scaled
    latents: mx.array,  # (positions, latent_dim)
    keys: mx.array,  # (positions, rope_dim)
    *,
    scale: float,
) -> mx.array:
    """(rows, heads, latent_dim), causal, of one sequence."""
    rows, positions = len(q_latent), len(latents)
    queries = q_latent[None].swapaxes(1, 2)
    latents = latents[None, None]
    added = q_rope[None].swapaxes(1, 2) @ keys.T
    if has_many_scores(queries, positions):
        added = added * LOG2_E + unseen_by(rows, positions)
        output = attend_written_out(queries, latents, latents, scale=scale, unseen=added)
    else:
        if rows > 1:
            added = added + unseen_by(rows, positions).astype(added.dtype)
        output = mx.fast.scaled_dot_product_attention(
            queries, latents, latents, scale=scale, mask=added
        )
    return output[0].swapaxes(0, 1)


def attend_gathered(
    q_latent: mx.array,  # (sequences, heads, latent_dim)
    q_rope: mx.array,
    k_pool: mx.array,  # (1, slots, latent_dim)
    v_pool: mx.array,
    slots: mx.array,  # (sequences, positions)
    unseen: mx.array,  # (sequences, 1, 1, positions): 0, or minus infinity
    *,
    scale: float,
) -> mx.array:
    """(sequences, heads, latent_dim), over copies of their latents; one row each."""
    latents, keys = (pool[:, slots].swapaxes(0, 1) for pool in (k_pool, v_pool))
    added = q_rope[:, :, None] @ keys.swapaxes(-1, -2) + unseen.astype(q_rope.dtype)
    return mx.fast.scaled_dot_product_attention(
        q_latent[:, :, None], latents, latents, scale=scale, mask=added
    )[:, :, 0]

"""Converts between the two layouts of DeepSeek's projection of latents to keys and values.

mlx-lm's DeepSeek V3 has two tensors (`embed_q`, `unembed_out`) and its V2 one (`kv_b_proj`);
llama.cpp's converter wrote one until May 2025, and two since. A converted tensor stays in 16 bits:
keys are transposed between the two, across the groups of a quantisation.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any

import mlx.core as mx

_ONE, _TWO = "attn_kv_b.weight", ("attn_k_b.weight", "attn_v_b.weight")


def other_form(name: str, there: Container[str]) -> tuple[str, ...]:
    """Names of the tensors that a missing one can be computed from; empty for other tensors."""
    for stem, others in ((_ONE, _TWO), (_TWO[0], (_ONE,)), (_TWO[1], (_ONE,))):
        if name.endswith(f".{stem}"):
            sources = tuple(name.removesuffix(stem) + other for other in others)
            return sources if all(source in there for source in sources) else ()
    return ()


def computed(name: str, tensors: Sequence[mx.array], config: Mapping[str, Any]) -> mx.array:
    """Compute the named tensor from those of `other_form`.

    one of them   (heads * (key + value), rank)
    two           (heads, rank, key), (heads, value, rank)
    """
    if name.endswith(_ONE):
        keys, values = tensors
        return mx.concatenate([keys.swapaxes(1, 2), values], axis=1).flatten(0, 1)
    [both] = tensors
    heads, width = config["num_attention_heads"], config["qk_nope_head_dim"]
    both = both.reshape(heads, -1, both.shape[-1])
    return both[:, :width].swapaxes(1, 2) if name.endswith(_TWO[0]) else both[:, width:]

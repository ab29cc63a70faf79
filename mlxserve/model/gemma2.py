"""Paged attention for Gemma 2, which caps its scores and therefore calls no fused attention.

Replacing `scaled_dot_product_attention` does not reach it, so its attention class gets a paged
path next to the original one.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxserve.cache.layer_kv import LayerKV

_MODULE = "mlx_lm.models.gemma2"


def use_paged_attention(model: nn.Module) -> None:
    """Add the paged path to the Gemma 2 attention layers of `model`. Idempotent."""
    for module in model.modules():
        kind = type(module)
        if kind.__module__ == _MODULE and kind.__name__ == "Attention":
            _extend(kind)


def _extend(attention: Any) -> None:
    if hasattr(attention, "dense_call"):
        return
    attention.dense_call = attention.__call__

    def call(
        self: Any, x: mx.array, mask: mx.array | None = None, cache: Any | None = None
    ) -> mx.array:
        if isinstance(cache, LayerKV):
            return _paged_call(self, x, mask, cache)
        output: mx.array = self.dense_call(x, mask, cache)
        return output

    attention.__call__ = call


def _paged_call(layer: Any, x: mx.array, mask: Any, cache: LayerKV) -> mx.array:
    """Compute the layer for x (T, 1, hidden), with attention over pages."""
    rows = x.shape[0]
    queries = layer.q_proj(x).reshape(rows, layer.n_heads, 1, layer.head_dim)
    keys = layer.k_proj(x).reshape(rows, layer.n_kv_heads, 1, layer.head_dim)
    values = layer.v_proj(x).reshape(rows, layer.n_kv_heads, 1, layer.head_dim)
    queries = layer.rope(queries, offset=cache.offset)
    cache.update_and_fetch(layer.rope(keys, offset=cache.offset), values)
    output = cache.attend(
        queries, scale=layer.scale, mask=mask, softcap=layer.attn_logit_softcapping
    )
    projected: mx.array = layer.o_proj(output.reshape(rows, 1, layer.n_heads * layer.head_dim))
    return projected

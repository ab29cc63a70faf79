"""Counts the multiply-adds of a loaded model's forward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxserve.core.forward_work import ForwardWork
from mlxserve.hub.files import text_config
from mlxserve.model.load import LoadedModel

_HEADS = ("num_attention_heads", "n_heads", "n_head", "num_heads")
_USED_EXPERTS = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk")


def forward_work(loaded: LoadedModel) -> ForwardWork:
    """Count all weights but embeddings; of experts those that a row uses."""
    config = text_config(loaded.config)
    num_used = _first_number(config, _USED_EXPERTS)
    weights = sum(
        _weight_work(module, num_used)
        for module in loaded.model.modules()
        if not isinstance(module, (nn.Embedding, nn.QuantizedEmbedding))
    )
    alike: Counter[int | None] = Counter()
    for spec in loaded.layers:
        heads = max(spec.kv_heads, num_query_heads(loaded))
        alike[spec.window] += heads * (spec.key_dim + spec.value_dim)
    return ForwardWork(weights, tuple((each, window) for window, each in alike.items()))


def num_query_heads(loaded: LoadedModel) -> int:
    """Query heads of a layer by the model's config; 1 if it does not say."""
    return _first_number(text_config(loaded.config), _HEADS) or 1


def _weight_work(module: nn.Module, num_used: int | None) -> int:
    weight = module.get("weight")
    if not isinstance(weight, mx.array) or weight.ndim < 2:
        return 0
    bits: int = getattr(module, "bits", 0)
    size = weight.nbytes * 8 // bits if bits else weight.size
    if weight.ndim == 3:  # one matrix per expert
        num_experts = weight.shape[0]
        return size * min(num_used or num_experts, num_experts) // num_experts
    return size


def _first_number(config: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    for name in names:
        value = config.get(name)
        if isinstance(value, int) and value > 0:
            return value
    return None

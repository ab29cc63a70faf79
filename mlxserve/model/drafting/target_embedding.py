"""The embedding of a model's tokens, as its first layer is given it."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn


def embedding_of(model: nn.Module) -> Callable[[mx.array], mx.array]:
    """Return the scaled embedding of a model of Gemma's: ids (T,) to (T, hidden size)."""
    inner = next(
        module
        for _, module in model.named_modules()
        if "embed_tokens" in module and hasattr(module, "embed_scale")
    )

    def embed(tokens: mx.array) -> mx.array:
        rows: mx.array = inner.embed_tokens(tokens) * inner.embed_scale
        return rows

    return embed

"""Casts models to float32, in which a CPU computes."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map
from mlx_lm.utils import dequantize_model


def dequantised_in_float32(model: nn.Module) -> nn.Module:
    """Dequantise a model with scales in float32.

    With scales in 16 bits, values would be rounded to these first, and be up to 0.4 % off.
    """
    # A second time for what has no scales in floats, such as mxfp4, whose values get 16 bits.
    return cast_to_float32(dequantize_model(cast_to_float32(model)))


def cast_to_float32(model: nn.Module) -> nn.Module:
    """Cast all floats of a model, in place."""
    model.update(
        tree_map(
            lambda a: a.astype(mx.float32) if mx.issubdtype(a.dtype, mx.floating) else a,
            model.parameters(),
        )
    )
    return model

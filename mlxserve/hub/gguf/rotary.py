"""Reads how a GGUF file scales rotary positions: from its header, or from tensors of factors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from mlxserve.core.errors import UnsupportedModel
from mlxserve.hub.gguf.reader import Header

Config = dict[str, Any]
# Metadata without the architecture's name before it.
Given = Mapping[str, Any]
_NOT_ROTATED = 1e20  # a frequency is divided by so much
_LLAMA_3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original": 8192}


def rope_scaling(header: Header, values: Given) -> Config | None:
    """Return the rotary scaling as transformers writes it; None if there is none.

    Raises UnsupportedModel.
    """
    long = _values(header, "rope_factors_long.weight")
    if long is not None:
        short = _values(header, "rope_factors_short.weight")
        original = values.get("rope.scaling.original_context_length")
        return {
            "type": "longrope",
            "long_factor": long,
            "short_factor": long if short is None else short,
            "original_max_position_embeddings": original or values.get("context_length"),
        }
    factors = _values(header, "rope_freqs.weight")
    if factors is not None and max(factors) > _NOT_ROTATED:
        share = sum(factor < _NOT_ROTATED for factor in factors) / len(factors)
        return {"rope_type": "proportional", "partial_rotary_factor": share}
    if factors is not None:
        return _llama_3(factors, float(values.get("rope.freq_base", 10_000.0)))
    kind = values.get("rope.scaling.type", "none")
    if kind == "none":
        return None
    factor = float(values.get("rope.scaling.factor", 1.0))
    if kind == "linear":
        return {"type": "linear", "rope_type": "linear", "factor": factor}
    if kind != "yarn":
        raise UnsupportedModel(f"The GGUF file scales positions by {kind!r:.40}, which is unknown.")
    scaling = {"type": "yarn", "rope_type": "yarn", "factor": factor}
    scaling["original_max_position_embeddings"] = values.get(
        "rope.scaling.original_context_length", values.get("context_length")
    )
    for key in ("beta_fast", "beta_slow"):
        if (value := values.get(f"rope.scaling.yarn_{key}")) is not None:
            scaling[key] = value
    if (multiplier := values.get("rope.scaling.yarn_log_multiplier")) is not None:
        # DeepSeek's two are equal, and the file has a tenth of them.
        scaling["mscale"] = scaling["mscale_all_dim"] = round(10 * multiplier, 6)
    return scaling


def _llama_3(factors: list[float], base: float) -> Config | None:
    """Recover Llama 3's rotary scaling from its per-frequency factors. Raises UnsupportedModel."""
    factor = max(factors)
    if factor <= 1:
        return None
    frequencies = base ** (np.arange(len(factors)) * 2 / (2 * len(factors)))
    wavelengths = 2 * np.pi * frequencies
    low, high, original = _LLAMA_3.values()
    smooth = (original / wavelengths - low) / (high - low)
    expected = 1 / ((1 - smooth) / factor + smooth)
    expected = np.where(wavelengths < original / high, 1.0, expected)
    expected = np.where(wavelengths > original / low, factor, expected)
    if not np.allclose(expected, factors, rtol=1e-3):
        raise UnsupportedModel(
            "The GGUF file has frequencies of its own for positions (rope_freqs.weight), which are "
            "not Llama 3's. Take the model's MLX conversion."
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def _values(header: Header, name: str) -> list[float] | None:
    tensor = header.tensors.get(name)
    if tensor is None or tensor.kind != "F32":
        return None
    count = tensor.nbytes // 4
    return [
        float(number) for number in np.fromfile(tensor.file, "<f4", count, offset=tensor.offset)
    ]

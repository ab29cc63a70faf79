"""Bounds for the numbers in a model's config.json.

They decide how many layers and arrays are built before the weights are compared with them: a million
layers would be built for hours. The bounds are far above any published model's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlxserve.core.errors import UnsupportedModel

MAX_LAYERS = 2_000
MAX_SIZE = 2**24
_MAX_POSITIONS = 2**31 - 1
_WHOLE = {  # (least, most); a list, one number for each layer, is left to the model
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), (1, MAX_LAYERS)),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "vocab_size", "head_dim"), (1, MAX_SIZE)),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "n_head"), (1, MAX_SIZE)),
    **dict.fromkeys(("intermediate_size", "moe_intermediate_size"), (0, MAX_SIZE)),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), (0, MAX_SIZE)),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), (2, _MAX_POSITIONS)),
}
_REAL = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "rope_theta")


def check_model_config(config: Mapping[str, Any], name: str) -> None:
    """Raises UnsupportedModel for a number that no model can have."""
    inner = config.get("text_config")
    for part in (config, inner if isinstance(inner, Mapping) else {}):
        for key in _WHOLE.keys() & part.keys():
            minimum, maximum = _WHOLE[key]
            value = part[key]
            if (
                value is not None
                and not isinstance(value, list)
                and not _is_whole(value, minimum, maximum)
            ):
                raise _refusal(name, key, value, f"a whole number from {minimum} to {maximum}")
        for key in _REAL:
            values = part[key] if isinstance(part.get(key), list) else [part.get(key)]
            if not all(value is None or _is_real(value) for value in values):
                raise _refusal(name, key, part[key], "a number")


def _is_whole(value: object, minimum: int, maximum: int) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return minimum <= value <= maximum and value == int(value)


def _is_real(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e30


def _refusal(name: str, key: str, value: object, wanted: str) -> UnsupportedModel:
    return UnsupportedModel(f"{name}: config.json's {key} must be {wanted}, got {value!r:.80}.")

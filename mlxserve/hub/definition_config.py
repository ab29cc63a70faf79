"""Adapts config.json to mlx-lm's definitions: values that published files put elsewhere or omit.

- A vision model's file may say at its top what holds for the text model, too (Qwen3-VL's
  `tie_word_embeddings`), and a definition looks only into `text_config`.
- transformers 5 writes `rope_parameters` instead of `rope_theta`, `rope_scaling` and
  `partial_rotary_factor`. A definition that reads only the latter would take its own defaults, and
  answer wrongly without an error.
- `model_file` names code in the folder, which is never run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlxserve.hub.context import rope_scaling

_INNER = "text_config"
# Of the whole model, or of its other parts.
_OUTER_ONLY = frozenset({"model_type", "architectures", "auto_map", "quantization"})
_OUTER_ONLY |= {"quantization_config", "dtype", "torch_dtype", "transformers_version"}


def changes_for_definition(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the changes to a config.json before mlx-lm reads it."""
    changes = {**_rope(config)}
    if config.get("model_file") is not None:
        changes["model_file"] = None
    inner = config.get(_INNER)
    if isinstance(inner, Mapping):
        whole = {**_shared(config), **{k: v for k, v in inner.items() if v is not None}}
        changes[_INNER] = {**inner, **whole, **_rope(whole)}
    return changes


def _shared(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return top-level values of a config that also apply to its text model."""
    return {
        key: value
        for key, value in config.items()
        if key not in _OUTER_ONLY and not key.endswith("_config") and value is not None
    }


def _rope(part: Mapping[str, Any]) -> dict[str, Any]:
    """Convert `rope_parameters` to `rope_theta` and the like where those are missing."""
    written = part.get("rope_parameters")
    if not isinstance(written, Mapping):
        return {}
    whole = rope_scaling({"rope_parameters": written})  # scaling of the full-attention layers
    rope: dict[str, Any] = {"rope_theta": whole.get("rope_theta")}
    kind = whole.get("rope_type") or whole.get("type") or "default"
    if kind != "default":
        rope["rope_scaling"] = {**whole, "type": kind, "rope_type": kind}
    if whole is written:
        rope["partial_rotary_factor"] = written.get("partial_rotary_factor")
    elif isinstance(sliding := written.get("sliding_attention"), Mapping):
        rope |= dict.fromkeys(("rope_local_base_freq", "swa_rope_theta"), sliding.get("rope_theta"))
    return {k: v for k, v in rope.items() if v is not None and part.get(k) is None}

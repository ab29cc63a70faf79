"""The families whose checkpoints have a head for multi-token prediction (MTP), and what differs among their heads.

    hidden state of token p - 1 ── norm ──┐
                                          ├── projection ── layer ── norm ── the model's own head ── token p + 1
    embedding of token p ──────── norm ───┘

The layer is one of the family's own. So a head is built as a family's model of one layer, whose embedding is the
left half of this drawing (`model/drafting/head_model.py`). Sources: vLLM's `qwen3_next_mtp.py`, `deepseek_mtp.py`, `mimo_mtp.py`,
`nemotron_h_mtp.py` and `step3p5_mtp.py`, and mlx-vlm's `speculative/drafters`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from mlxserve.hub.files import text_config

Config = Mapping[str, Any]
Changes = Callable[[Config, bool], dict[str, Any]]  # (the text's config, the layer has experts)

# Modules of a head, by their names in checkpoints and in what mlx-vlm has split off.
_EMBEDDING_NORM, _HIDDEN_NORM, _PROJECTION = "embedding_norm", "hidden_norm", "projection"
FINAL_NORM = "final_norm"
ROLES = {
    "pre_fc_norm_embedding": _EMBEDDING_NORM,
    "enorm": _EMBEDDING_NORM,
    "token_layernorm": _EMBEDDING_NORM,
    "pre_fc_norm_hidden": _HIDDEN_NORM,
    "hnorm": _HIDDEN_NORM,
    "hidden_layernorm": _HIDDEN_NORM,
    "fc": _PROJECTION,
    "eh_proj": _PROJECTION,
    "input_proj": _PROJECTION,
    "shared_head.norm": FINAL_NORM,
    "shared_head_norm": FINAL_NORM,
    "final_layernorm": FINAL_NORM,
}
_SHARED = ("embed_tokens", "shared_head.head", "shared_head.output", "lm_head")
_LAYER = re.compile(r"layers\.(\d+)\.(.+)")
_SPLIT_OFF = re.compile(r"(?:(?:model|mtp|language_model)\.)*")


@dataclass(frozen=True, slots=True)
class HeadFamily:
    """Describes how a family's heads differ from those of other families.

    prefix            pattern of the names of a head's tensors; {n} is the number of the model's layers
    changes           to the text's config, for a model whose only layer is the head's
    inner             path of the family's inner model, which has the embedding, the layers and the norm
    embedding         the embedding's name in it
    norm              the norm's
    is_hidden_first   the projection's input is (hidden state, embedding), not (embedding, hidden state)
    carries_normed    the next guess of a draft is given this one's hidden state after the last norm, not before it
    takes_normed      the model's hidden state is taken after its last norm, not before it
    is_minus_one      published norms are stored minus one
    """

    prefix: str
    changes: Changes
    inner: str = "model"
    embedding: str = "embed_tokens"
    norm: str = "norm"
    is_hidden_first: bool = False
    carries_normed: bool = True
    takes_normed: bool = True
    is_minus_one: bool = False

    def pattern(self, config: Config) -> re.Pattern[str]:
        """Return what the names of a head's tensors begin with, in a checkpoint with this config."""
        layers = text_config(config).get("num_hidden_layers")
        return re.compile(self.prefix.replace("{n}", str(layers)))


def family_of(config: Config) -> HeadFamily | None:
    """Return the family of a model's config; None if nothing is known about its heads."""
    return FAMILIES.get(str(config.get("model_type")).removesuffix("_text"))


def is_split_off(config: Config) -> bool:
    """True if a folder has a head alone, as mlx-vlm writes it."""
    return str(config.get("model_type")).endswith("_mtp")


def head_tensors(names: Collection[str], config: Config, family: HeadFamily) -> dict[str, str]:
    """Map the names of a head's tensors in a folder to those after their prefix.

    config: the folder's own
    """
    pattern = _SPLIT_OFF if is_split_off(config) else family.pattern(config)
    matches = {name: pattern.match(name) for name in names}
    return {name: name[match.end() :] for name, match in matches.items() if match is not None}


def has_head(names: Collection[str], config: Config) -> bool:
    """True if a model's files, with tensors of these names, have a head that mlxserve knows."""
    family = family_of(config)
    return family is not None and is_head(head_tensors(names, config, family))


def is_head(tensors: Mapping[str, str]) -> bool:
    """True if what `head_tensors` returned is a whole head, and not only parts of one."""
    roles = {place[0] for name in tensors.values() if (place := place_of(name)) is not None}
    return roles == {None, *ROLES.values()}


def place_of(name: str) -> tuple[str | None, str] | None:
    """Return (role, parameter) of a head's tensor, or (None, its name among the layers).

    None for what a head shares with its model, and for buffers.
    """
    name = name.replace("transformer.", "").removeprefix("mtp_block.")
    match = _LAYER.fullmatch(name)
    index, rest = (None, name) if match is None else (match[1], match[2])
    module, _, parameter = rest.rpartition(".")
    if module in _SHARED or rest.endswith("inv_freq"):
        return None
    if module in ROLES:
        return ROLES[module], parameter
    if index is None and module == "norm":
        return FINAL_NORM, parameter
    return None, f"layers.{index or 0}.{rest}"


def _of_qwen3_next(_text: Config, has_experts: bool) -> dict[str, Any]:
    dense = [] if has_experts else [0]
    return {"full_attention_interval": 1, "decoder_sparse_step": 1, "mlp_only_layers": dense}


def _of_qwen3_5(_text: Config, _has_experts: bool) -> dict[str, Any]:
    return {"full_attention_interval": 1}


def _of_deepseek(_text: Config, has_experts: bool) -> dict[str, Any]:
    return {"first_k_dense_replace": 0 if has_experts else 1, "moe_layer_freq": 1}


def _of_mimo(_text: Config, _has_experts: bool) -> dict[str, Any]:
    return {}


def _of_nemotron(text: Config, _has_experts: bool) -> dict[str, Any]:
    """The layers of a head have a pattern of their own: attention, then experts."""
    pattern = text.get("mtp_hybrid_override_pattern") or "*E"
    return {
        "hybrid_override_pattern": list(pattern),
        "layers_block_type": text.get("mtp_layers_block_type"),
        "layer_types": None,
    }


_BY_LAYER = (
    "layer_types",
    "rope_theta",
    "partial_rotary_factors",
    "swiglu_limits",
    "swiglu_limits_shared",
)


def _of_step(text: Config, has_experts: bool) -> dict[str, Any]:
    """Lists by layer have entries for those of the heads, behind the model's own."""
    at = text["num_hidden_layers"]
    own = {name: text[name][at : at + 1] for name in _BY_LAYER if isinstance(text.get(name), list)}
    return {**own, "moe_layers_enum": "0" if has_experts else ""}


_QWEN = r"\A(?:.*\.)?mtp\."
_LIKE_DEEPSEEK = HeadFamily(r"model\.layers\.{n}\.", _of_deepseek, carries_normed=False)
_LIKE_QWEN3_5 = HeadFamily(_QWEN, _of_qwen3_5, "language_model.model", is_minus_one=True)

FAMILIES: dict[str, HeadFamily] = {
    "qwen3_next": HeadFamily(_QWEN, _of_qwen3_next, is_minus_one=True),
    "qwen3_5": _LIKE_QWEN3_5,
    "qwen3_5_moe": _LIKE_QWEN3_5,
    "deepseek_v3": _LIKE_DEEPSEEK,
    "glm4_moe": _LIKE_DEEPSEEK,
    "glm4_moe_lite": _LIKE_DEEPSEEK,
    "mimo": HeadFamily(r"model\.mtp_layers\.0\.", _of_mimo, is_hidden_first=True),
    "nemotron_h": HeadFamily(
        _QWEN, _of_nemotron, inner="backbone", embedding="embeddings", norm="norm_f"
    ),
    "step3p5": HeadFamily(
        r"model\.layers\.{n}\.",
        _of_step,
        carries_normed=False,
        takes_normed=False,
        is_minus_one=True,
    ),
}

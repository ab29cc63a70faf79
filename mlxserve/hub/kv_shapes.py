"""The shape of a model's KV cache, read from its config.json.

For listing models without importing mlx. A loaded model's shapes are measured (`model/caches.py`),
and a test compares the two for every architecture.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any

from mlxserve.hub.step_estimate import copied_values

Config = Mapping[str, Any]

_RECURRENT_ONLY = frozenset({"mamba", "mamba2", "falcon_mamba", "rwkv7"})
_BOTH_IN_A_LAYER = frozenset({"baichuan_m1", "falcon_h1", "longcat_flash_ngram", "plamo2"})
_LAYERS = ("num_hidden_layers", "n_layers", "n_layer", "num_layers")
_KINDS = ("layer_types", "layers_block_type", "block_types", "hybrid_override_pattern")
# What these lists call a layer with attention; every other kind keeps no keys.
_ATTENTION = frozenset({"attention", "full_attention", "sliding_attention", "chunked_attention"})
_ATTENTION |= {"*", "hybrid", "global", "local", "sliding"}
# Of these, what lists call one that sees the last positions only.
_WINDOWED = frozenset({"sliding_attention", "sliding", "local"})
# N for every N-th layer being global, if a config leaves it to its class.
_PATTERNS = {"cohere2": 4, "gemma3_text": 6, "gpt_oss": 2, "olmo3": 4}
# Latent attention, of which mlx-lm keeps the expanded keys and values of all heads.
_EXPANDED = frozenset({"deepseek_v2", "minicpm3", "youtu_llm"})


@dataclass(frozen=True, slots=True)
class KVShape:
    """Sizes of what a model keeps of a sequence."""

    num_values: int  # keys and values per token, over all layers
    has_states: bool  # recurrent ones as well
    num_rows: int = 0  # rows of these values: a head's keys or values; 0 for latents
    # Layers with a window beside others that see everything, which have pages of their own
    # (`cache/groups.py`): positions that they see, and their part of the numbers above.
    window: int = 0
    num_window_values: int = 0
    num_window_rows: int = 0


def kv_shape(text: Config) -> KVShape:
    """Return the shape for the text part of a config.json (`hub.files.text_config`).

    Raises KeyError, TypeError, ValueError or ZeroDivisionError if values are missing.
    """
    count = int(_first(text, *_LAYERS))
    if text.get("model_type") in _RECURRENT_ONLY:
        return KVShape(0, has_states=True)
    kinds = _kinds(text, count)
    num_reused = int(text.get("num_kv_shared_layers") or text.get("num_kv_reuse_layers") or 0)
    # The last layers use the keys of others.
    own = kinds[: count - num_reused]
    parts = [(_of_kind(text, kind), kind) for kind in own if kind in _ATTENTION]
    num_chosen, chosen_dim = _keys_for_choosing(text)
    num_values = sum(_values(part, kind) for part, kind in parts) + num_chosen * chosen_dim
    num_rows = sum(_rows(part, kind) for part, kind in parts) + 2 * num_chosen
    has_states = text.get("model_type") in _BOTH_IN_A_LAYER
    has_states = has_states or any(kind not in _ATTENTION for kind in kinds)
    windowed = [(part, kind) for part, kind in parts if kind in _WINDOWED]
    window = _window(text)
    if has_states or not window or not 0 < len(windowed) < len(parts):
        return KVShape(num_values, has_states, num_rows)
    num_window_values = sum(_values(part, kind) for part, kind in windowed)
    num_window_rows = sum(_rows(part, kind) for part, kind in windowed)
    return KVShape(num_values, False, num_rows, window, num_window_values, num_window_rows)


def copied_of(text: Config) -> int:
    """Keys and values of a token in the largest layer whose pages a long chunk copies.

    This is `copied` of `hub/step_estimate.py`. Raises as `kv_shape` does.
    """
    if text.get("model_type") in _RECURRENT_ONLY or text.get("kv_lora_rank"):
        return 0
    kinds = _ATTENTION.intersection(_kinds(text, int(_first(text, *_LAYERS))))
    return max((_copied(_of_kind(text, kind), kind) for kind in kinds), default=0)


def _copied(text: Config, kind: str) -> int:
    return copied_values(_heads(text, kind), _head_dim(text, kind))


def num_layers(text: Config) -> int | None:
    """Return the number of layers; None if the config does not name it."""
    try:
        return int(_first(text, *_LAYERS))
    except (KeyError, TypeError, ValueError):
        return None


def head_sizes(text: Config) -> tuple[int, int, int]:
    """Return (query heads, head size, hidden size). Raises as `kv_shape` does."""
    num_heads = int(_first(text, "num_attention_heads", "n_head", "n_heads", "num_heads"))
    width = text.get("hidden_size") or text.get("n_embd") or text.get("d_model")
    head_dim = int(text.get("head_dim") or int(width or text["hidden_dim"]) // num_heads)
    return num_heads, head_dim, int(width or num_heads * head_dim)


def _kinds(text: Config, num_layers: int) -> list[str]:
    """The kind of every layer."""
    for key in _KINDS:
        if listed := text.get(key):
            return list(islice(cycle(map(str, listed)), num_layers))
    if windows := text.get("hybrid_layer_pattern"):
        return ["sliding_attention" if window else "full_attention" for window in windows]
    pattern = text.get("sliding_window_pattern") or _PATTERNS.get(str(text.get("model_type")))
    if pattern and _window(text):
        return _by_pattern(pattern, num_layers)
    attending = _attending(text, num_layers)
    return ["full_attention" if i in attending else "recurrent" for i in range(num_layers)]


def _by_pattern(pattern: int | str, num_layers: int) -> list[str]:
    """Expand a pattern to a kind per layer.

    pattern: N for every N-th layer global, or a letter for each layer: L with a window, G without
    """
    if isinstance(pattern, str):
        return [
            "sliding_attention" if letter == "L" else "full_attention"
            for letter in islice(cycle(pattern), num_layers)
        ]
    return [
        "full_attention" if number % pattern == 0 else "sliding_attention"
        for number in range(1, num_layers + 1)
    ]


def _window(text: Config) -> int:
    """Positions that a sliding-window layer sees; 0 if the config does not say."""
    return int(text.get("sliding_window") or text.get("sliding_window_size") or 0)


def _of_kind(text: Config, kind: str) -> Config:
    """Return the config with the sizes of this kind of layer, where it has its own."""
    if kind != "sliding_attention":
        return text
    own = {key[4:]: value for key, value in text.items() if key.startswith("swa_")}
    return {**text, **own, **(text.get("attention_other_setting") or {})}


def _keys_for_choosing(text: Config) -> tuple[int, int]:
    """(layers, size) of the extra keys by which MiniMax M3 selects blocks."""
    sparse = text.get("sparse_attention_config") or {}
    return sum(sparse.get("sparse_attention_freq") or ()), int(sparse.get("sparse_index_dim") or 0)


def _attending(text: Config, num_layers: int) -> set[int]:
    """Layers with attention, if the config does not list the kinds."""
    every = set(range(num_layers))
    for key in ("full_attn_idxs", "attn_layer_indices"):
        if text.get(key):
            return {int(index) for index in text[key]}
    if linear := text.get("linear_attn_config"):  # it counts from one
        return every - {int(number) - 1 for number in linear["kda_layers"]}
    if types := text.get("attn_type_list"):
        return {index for index, kind in enumerate(types) if kind}
    if period := text.get("attn_layer_period"):
        return set(range(int(text.get("attn_layer_offset") or 0), num_layers, int(period)))
    if group := text.get("layer_group_size"):
        whole = num_layers - num_layers % int(group)
        return {index for index in every if (index + 1) % int(group) == 0 or index >= whole}
    if text.get("linear_num_value_heads"):
        interval = int(text.get("full_attention_interval") or 4)
        return set(range(interval - 1, num_layers, interval))
    return every


def _values(text: Config, kind: str) -> int:
    """Keys and values of one token in a layer."""
    rank = text.get("kv_lora_rank")
    if rank:
        rotated, plain = int(text["qk_rope_head_dim"]), int(text["qk_nope_head_dim"])
        if text.get("model_type") in _EXPANDED:
            num_heads, head_dim, _ = head_sizes(text)
            return num_heads * (plain + rotated + int(text.get("v_head_dim") or head_dim))
        # A layer that chooses the keys it attends over keeps keys for choosing, in pairs of arrays.
        chosen = 2 * int(text.get("index_head_dim") or 0)
        return int(rank) + rotated + chosen
    head_dim = _head_dim(text, kind)
    return _heads(text, kind) * (head_dim + int(text.get("v_head_dim") or head_dim))


def _rows(text: Config, kind: str) -> int:
    """Rows of one token in a layer: a head's keys or values.

    Latents are no rows, except in a layer that selects its keys: there they are stored as rows,
    beside the keys for selecting.
    """
    if text.get("kv_lora_rank") and text.get("model_type") not in _EXPANDED:
        return 4 if text.get("index_head_dim") else 0
    if text.get("kv_lora_rank"):
        return 2 * head_sizes(text)[0]
    return 2 * _heads(text, kind)


def _head_dim(text: Config, kind: str) -> int:
    """Head dimension of the keys in a layer without latents."""
    _, head_dim, _ = head_sizes(text)
    if kind == "full_attention":
        head_dim = int(text.get("global_head_dim") or head_dim)
    return head_dim


def _heads(text: Config, kind: str) -> int:
    """Key heads of a layer without latents."""
    num_heads, _, _ = head_sizes(text)
    kv_heads = text.get("num_key_value_heads") or text.get("num_kv_heads")
    kv_heads = kv_heads or text.get("num_attention_groups") or num_heads
    if kind == "full_attention":
        kv_heads = text.get("num_global_key_value_heads") or kv_heads
    return int(kv_heads)


def _first(text: Config, *keys: str) -> Any:
    """Return the first of these values that the config has. Raises KeyError."""
    for key in keys:
        if text.get(key) is not None:
            return text[key]
    raise KeyError(keys[0])

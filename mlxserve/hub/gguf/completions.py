"""Computes configuration that depends on several values of a GGUF file.

Each function follows llama.cpp's code of the architecture (src/models/, src/llama-model.cpp).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mlxserve.core.errors import UnsupportedModel
from mlxserve.hub.gguf.rotary import Config, Given

_SIGMOID = 2  # value of `expert_gating_func`


def _llama(config: Config, values: Given) -> Config:
    if "attention.key_length" not in values and "rope.dimension_count" in values:
        config = config | {"head_dim": values["rope.dimension_count"]}
    return config | {"model_type": "mixtral"} if config.get("num_local_experts") else config


def _gemma(config: Config, _: Given) -> Config:
    """Query scale of Gemma: 27B models use hidden size per head, others the head size."""
    is_27b = (config["model_type"], config["num_hidden_layers"]) in (
        ("gemma2", 46),
        ("gemma3_text", 62),
    )
    width = config["hidden_size"] // config["num_attention_heads"]
    return config | {"query_pre_attn_scalar": width if is_27b else config["head_dim"]}


def _part_rotated(config: Config, values: Given) -> Config:
    rotated = values.get("rope.dimension_count", config["head_dim"])
    original = values.get("rope.scaling.original_context_length")
    rotary = {"partial_rotary_factor": rotated / config["head_dim"]}
    return config | rotary | ({"original_max_position_embeddings": original} if original else {})


def _gpt_oss(config: Config, _: Given) -> Config:
    kinds = ("sliding_attention", "full_attention")
    layers = [kinds[number % 2] for number in range(config["num_hidden_layers"])]
    return config | {"layer_types": layers}


def _lfm2(config: Config, values: Given) -> Config:
    """Layer kinds of LFM2: a layer without key heads is a convolution."""
    counts = values["attention.head_count_kv"]
    counts = counts if isinstance(counts, list) else [counts] * config["num_hidden_layers"]
    return config | {
        "num_key_value_heads": max(counts),
        "layer_types": ["full_attention" if count else "conv" for count in counts],
        "conv_bias": False,
    }


def _deepseek(config: Config, values: Given) -> Config:
    key = values.get("attention.key_length_mla", values.get("attention.key_length", 0))
    value = values.get("attention.value_length_mla", values.get("attention.value_length", 0))
    is_v3 = values.get("expert_gating_func") == _SIGMOID
    num_groups = config.get("n_group") or 1
    topk = "noaux_tc" if is_v3 else "group_limited_greedy" if num_groups > 1 else "greedy"
    config = {key: value for key, value in config.items() if key != "head_dim"}
    return config | {
        "model_type": "deepseek_v3" if is_v3 else "deepseek_v2",
        "q_lora_rank": config.get("q_lora_rank"),
        "qk_nope_head_dim": key - config["qk_rope_head_dim"],
        "v_head_dim": value,
        "num_key_value_heads": config["num_attention_heads"],
        "topk_method": topk,
        "n_group": num_groups,
        "topk_group": config.get("topk_group") or 1,
        "moe_layer_freq": 1,
        "attention_bias": False,
        # mlx-lm's DeepSeek V2 always scales positions.
        **({} if is_v3 or "rope_scaling" in config else {"rope_scaling": {"factor": 1.0}}),
    }


def _mistral3(config: Config, values: Given) -> Config:
    """Rotation and scaled queries of Ministral 3; without `attention.temperature_scale` there are none."""
    rotary: Config = {**(config.get("rope_scaling") or {"rope_type": "default"})}
    if "mscale" in rotary:  # the file has the whole number here
        rotary["mscale"] = rotary["mscale_all_dim"] = values["rope.scaling.yarn_log_multiplier"]
    original = values.get("rope.scaling.original_context_length", values.get("context_length"))
    rotary |= {
        "rope_theta": config.get("rope_theta", 10_000.0),
        "llama_4_scaling_beta": config.get("llama_4_scaling_beta", 0.0),
        "original_max_position_embeddings": original,
    }
    return config | {"rope_parameters": rotary}


def _minicpm(config: Config, values: Given) -> Config:
    depth = values["residual_scale"] * config["num_hidden_layers"] ** 0.5
    base = config["hidden_size"] / values.get("logit_scale", 1.0)
    return config | {"scale_depth": depth, "dim_model_base": base}


def _exaone4(config: Config, values: Given) -> Config:
    """The large one has a window in three layers of four."""
    window = values.get("attention.sliding_window")
    pattern = {"sliding_window": window, "sliding_window_pattern": "LLLG" if window else None}
    return {"rope_scaling": None} | config | pattern


def _gpt_neox(config: Config, values: Given) -> Config:
    rotated = values.get("rope.dimension_count", config["head_dim"])
    base = {"rotary_emb_base": int(config.get("rope_theta", 10_000))}
    return config | base | {"rotary_pct": rotated / config["head_dim"]}


def _gpt(config: Config, _: Given) -> Config:
    heads = config.pop("num_key_value_heads", None)
    return config | {
        "n_ctx": config["n_positions"],
        "multi_query": heads == 1,
        "attention_bias": True,
        "mlp_bias": True,
    }


def _bailing(config: Config, values: Given) -> Config:
    rotated = values.get("rope.dimension_count", config["head_dim"])
    is_sigmoid = values.get("expert_gating_func") == _SIGMOID
    return config | {
        "rotary_dim": rotated,
        "score_function": "sigmoid" if is_sigmoid else "softmax",
        "moe_router_enable_expert_bias": is_sigmoid,
    }


def _lfm2_moe(config: Config, values: Given) -> Config:
    return _lfm2({**config, "routed_scaling_factor": 1.0}, values)


def _windows(config: Config, values: Given, every: int = 4) -> list[str]:
    """Return `layer_types`: the file's pattern, or a full layer after every - 1 with a window."""
    pattern = values.get("attention.sliding_window_pattern", every)
    count = config["num_hidden_layers"]
    if not isinstance(pattern, list):
        pattern = [(number + 1) % pattern != 0 for number in range(count)]
    return ["sliding_attention" if is_window else "full_attention" for is_window in pattern[:count]]


def _exaone_moe(config: Config, values: Given) -> Config:
    count, dense = config["num_hidden_layers"], values.get("leading_dense_block_count", 0)
    is_expert = [number >= dense for number in range(count)]
    return config | {"layer_types": _windows(config, values), "is_moe_layer": is_expert}


def _afmoe(config: Config, values: Given) -> Config:
    return config | {"layer_types": _windows(config, values)}


def _mimo_2(config: Config, values: Given) -> Config:
    """Layers with a window have their own number of key heads; all have sizes of one head."""
    count = config["num_hidden_layers"]
    is_window = [bool(each) for each in values["attention.sliding_window_pattern"][:count]]
    heads = values["attention.head_count_kv"]
    heads = heads if isinstance(heads, list) else [heads] * count
    full = [number for number, window in zip(heads, is_window, strict=False) if not window]
    windows = [number for number, window in zip(heads, is_window, strict=False) if window]
    dense = values.get("leading_dense_block_count", 0)
    return config | {
        "hybrid_layer_pattern": [int(window) for window in is_window],
        "moe_layer_freq": [int(number >= dense) for number in range(count)],
        "num_key_value_heads": (full or windows)[0],
        "swa_num_key_value_heads": (windows or full)[0],
        "swa_num_attention_heads": config["num_attention_heads"],
        "swa_head_dim": config["head_dim"],
        "swa_v_head_dim": config["v_head_dim"],
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "partial_rotary_factor": values["rope.dimension_count"] / config["head_dim"],
        "n_shared_experts": None,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": config.get("routed_scaling_factor", 1.0),
    }


def _delta(config: Config, values: Given) -> Config:
    """Qwen3-Next and Qwen 3.5: layers with a delta rule, and every fourth one with attention."""
    heads = config["linear_num_value_heads"]
    factor = values.get("rope.dimension_count", config["head_dim"]) / config["head_dim"]
    rotary = {"rope_theta": config.get("rope_theta", 10_000.0), "partial_rotary_factor": factor}
    return (
        {"intermediate_size": 0}
        | config
        | rotary
        | {
            "linear_value_head_dim": values["ssm.inner_size"] // heads,
            "rope_parameters": {"type": "default", **rotary},
        }
    )


def _nemotron_h(config: Config, values: Given) -> Config:
    """A layer is one of three: attention if it has key heads, an MLP if it has a width, or Mamba 2."""
    count = config["num_hidden_layers"]
    heads, widths = (
        value if isinstance(value, list) else [value] * count
        for value in (values["attention.head_count_kv"], values["feed_forward_length"])
    )
    mlp = "E" if config.get("n_routed_experts") else "-"
    kinds = zip(heads[:count], widths[:count], strict=True)
    return config | {
        "hybrid_override_pattern": [
            "*" if head else mlp if width else "M" for head, width in kinds
        ],
        "num_key_value_heads": max(heads),
        "intermediate_size": max(widths),
        "mamba_head_dim": values["ssm.inner_size"] // config["mamba_num_heads"],
        "mamba_proj_bias": False,
        "use_conv_bias": True,
        "topk_group": config.get("topk_group", 1),
    }


def _granite_hybrid(config: Config, values: Given) -> Config:
    heads = values["attention.head_count_kv"]
    heads = heads if isinstance(heads, list) else [heads] * config["num_hidden_layers"]
    is_rotated = values.get("rope.scaling.finetuned", False)
    return config | {
        "layer_types": ["attention" if each else "mamba" for each in heads],
        "num_key_value_heads": max(heads),
        "mamba_d_head": values["ssm.inner_size"] // config["mamba_n_heads"],
        "position_embedding_type": "rope" if is_rotated else "nope",
    }


def _mamba_2(config: Config, values: Given) -> Config:
    if values.get("ssm.group_count", 1) != 1:
        raise UnsupportedModel(
            "GGUF files of Mamba 2 with several groups are not supported: mlx-lm's definition norms "
            "all groups together, and llama.cpp each."
        )
    return config | {"head_dim": values["ssm.inner_size"] // config["num_heads"]}


def _jamba(config: Config, values: Given) -> Config:
    if values.get("expert_count"):
        raise UnsupportedModel(
            "GGUF files of Jamba with experts are not supported: mlx-lm's definition weighs experts "
            "otherwise than the model was trained, and llama.cpp computes it."
        )
    heads = values["attention.head_count_kv"]
    heads = heads if isinstance(heads, list) else [heads] * config["num_hidden_layers"]
    return config | {
        "layers_block_type": ["attention" if each else "mamba" for each in heads],
        "num_key_value_heads": max(heads),
        "mamba_expand": values["ssm.inner_size"] // config["hidden_size"],
        "attn_layer_offset": 0,
        "attn_layer_period": 1,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
    }


def _falcon_h1(config: Config, values: Given) -> Config:
    return config | {"mamba_d_head": values["ssm.inner_size"] // config["mamba_n_heads"]}


def _glm_moe(config: Config, values: Given) -> Config:
    groups = {"n_group": 1, "topk_group": 1, "rope_scaling": None}
    return groups | _part_rotated(config, values)


def _text_config(config: Config, _: Given) -> Config:
    return config | {"text_config": dict(config)}


def _gemma_3n(config: Config, values: Given) -> Config:
    """Sizes that llama.cpp's code has, not the file."""
    count = config["num_hidden_layers"]
    sparse = min(count, 10)
    config = config | {
        "vocab_size_per_layer_input": config["vocab_size"],
        "layer_types": _windows(config, values, every=5),
        "activation_sparsity_pattern": [0.95] * sparse + [0.0] * (count - sparse),
        "rope_local_base_freq": config.get("rope_local_base_freq", 10_000.0),
        "final_logit_softcapping": config.get("final_logit_softcapping", 30.0),
        "altup_coef_clip": 120.0,
        "altup_correct_scale": True,
        "laurel_rank": 64,
        "intermediate_size": _first(config["intermediate_size"]),
    }
    return config | {"text_config": dict(config)}


def _first(value: Any) -> Any:
    return value[0] if isinstance(value, list) else value


def _gemma_4(config: Config, values: Given) -> Config:
    """Full layers have heads of another size, and where no layer has values of its own, other counts too."""
    kinds = _windows(config, values, every=5)
    heads = values.get("attention.head_count_kv", config["num_attention_heads"])
    heads = heads if isinstance(heads, list) else [heads] * len(kinds)
    by_kind = dict(zip(kinds, heads, strict=False))
    widths = values["feed_forward_length"]
    wide = isinstance(widths, list) and max(widths) == 2 * min(widths)
    rotary = config.pop("rope_scaling", None) or {"partial_rotary_factor": 1.0}
    full = {"rope_theta": config.get("rope_theta", 1_000_000.0), **rotary}
    window = {"rope_theta": values.get("rope.freq_base_swa", 10_000.0), "rope_type": "default"}
    return config | {
        "layer_types": kinds,
        "num_key_value_heads": by_kind.get("sliding_attention", heads[0]),
        "num_global_key_value_heads": by_kind.get("full_attention"),
        "intermediate_size": _first(widths),
        "use_double_wide_mlp": wide,
        "vocab_size_per_layer_input": config["vocab_size"],
        "rope_parameters": {"full_attention": full, "sliding_attention": window},
    }


COMPLETIONS: Mapping[str, Callable[[Config, Given], Config]] = {
    "llama": _llama,
    "gemma2": _gemma,
    "gemma3": _gemma,
    "phi3": _part_rotated,
    "glm4": _part_rotated,
    "mistral3": _mistral3,
    "minicpm": _minicpm,
    "exaone4": _exaone4,
    "gptneox": _gpt_neox,
    "gpt2": _gpt,
    "starcoder": _gpt,
    **dict.fromkeys(("bailingmoe", "bailingmoe2"), _bailing),
    "lfm2moe": _lfm2_moe,
    "glm4moe": _glm_moe,
    **dict.fromkeys(("qwen2vl", "qwen3vl", "qwen3vlmoe"), _text_config),
    "gemma3n": _gemma_3n,
    "gemma4": _gemma_4,
    "exaone-moe": _exaone_moe,
    "afmoe": _afmoe,
    "mimo2": _mimo_2,
    **dict.fromkeys(("qwen35", "qwen35moe", "qwen3next"), _delta),
    **dict.fromkeys(("nemotron_h", "nemotron_h_moe"), _nemotron_h),
    "granitehybrid": _granite_hybrid,
    "mamba2": _mamba_2,
    "jamba": _jamba,
    "falcon-h1": _falcon_h1,
    **dict.fromkeys(("phi2", "stablelm", "nemotron"), _part_rotated),
    "gpt-oss": _gpt_oss,
    "lfm2": _lfm2,
    "deepseek2": _deepseek,
}

"""Small models of each architecture, as mlx-lm has them and as llama.cpp's converter writes them.

Names and metadata are written out here, from llama.cpp's (convert_hf_to_gguf.py, gguf-py/gguf/constants.py),
so that a table of the product is not compared with itself.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from mlx.utils import tree_flatten

from tests.hub.gguf.files import Array, byte_level_vocabulary, in_pairs, write_gguf

VOCAB = 288
CONFIG: Mapping[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "vocab_size": VOCAB,
    "attention_bias": False,
    "mlp_bias": False,
}
METADATA: Mapping[str, Any] = {
    "embedding_length": 64,
    "feed_forward_length": 96,
    "block_count": 2,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 1e6,
    "context_length": 256,
}
NAMES: Mapping[str, str] = {  # of llama.cpp, by mlx-lm's
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate": "ffn_gate_inp",
    "mlp.switch_mlp.gate_proj": "ffn_gate_exps",
    "mlp.switch_mlp.up_proj": "ffn_up_exps",
    "mlp.switch_mlp.down_proj": "ffn_down_exps",
}
_SANDWICH = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_BLOCK_SPARSE = {
    "block_sparse_moe.gate": "ffn_gate_inp",
    "block_sparse_moe.router.layer": "ffn_gate_inp",
    "block_sparse_moe.switch_mlp.gate_proj": "ffn_gate_exps",
    "block_sparse_moe.switch_mlp.up_proj": "ffn_up_exps",
    "block_sparse_moe.switch_mlp.down_proj": "ffn_down_exps",
}
_GRANITE_CONFIG = {
    "logits_scaling": 4.0,
    "attention_multiplier": 0.125,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.5,
    "tie_word_embeddings": True,
}
_GRANITE_METADATA = {
    "logit_scale": 4.0,
    "attention.scale": 0.125,
    "embedding_scale": 3.0,
    "residual_scale": 0.5,
    "rope.dimension_count": 16,
}
_LATENT_CONFIG = {
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    "n_group": 1,
    "topk_group": 1,
    "rope_scaling": {
        "type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}
_LATENT_METADATA = {
    "attention.head_count": 2,
    "attention.kv_lora_rank": 32,
    "rope.dimension_count": 16,
    "leading_dense_block_count": 1,
    "expert_count": 4,
    "expert_shared_count": 1,
    "expert_used_count": 2,
    "expert_feed_forward_length": 32,
    "expert_weights_scale": 2.5,
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 64,
    "rope.scaling.yarn_log_multiplier": 0.1,
}
_LATENT_NAMES = {
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
    "self_attn.embed_q": "attn_k_b",
    "self_attn.unembed_out": "attn_v_b",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
}


@dataclass(frozen=True)
class Architecture:
    """written: the model type's other than `name` where llama.cpp has another name for it
    are_pairs: rows of q and k are permuted
    norm_offset: is added to norms
    extra: tensors that are not parameters
    """

    name: str
    model_type: str
    config: Mapping[str, Any] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    are_pairs: bool = False
    norm_offset: float = 0.0
    extra: Mapping[str, Array] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.name}/{self.model_type}"


def llama_3_factors(factor: float) -> Array:
    """As `LlamaModel.generate_extra_tensors` computes them, for heads of 16 and a base of 1e6."""
    found = []
    for index in range(0, 16, 2):
        wavelength = 2 * np.pi * 1e6 ** (index / 16)
        if wavelength < 8192 / 4:
            found.append(1.0)
        elif wavelength > 8192:
            found.append(factor)
        else:
            smooth = (8192 / wavelength - 1) / 3
            found.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(found, np.float32)


_LLAMA = {"rope.dimension_count": 16}
ARCHITECTURES = (
    Architecture("llama", "llama", metadata=_LLAMA, are_pairs=True),
    Architecture(
        "llama",
        "llama",
        {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}, "tie_word_embeddings": True},
        _LLAMA,
        are_pairs=True,
        extra={"rope_freqs.weight": llama_3_factors(8.0)},
    ),
    Architecture(
        "llama",
        "mixtral",
        {"num_local_experts": 4, "num_experts_per_tok": 2},
        {**_LLAMA, "expert_count": 4, "expert_used_count": 2},
        _BLOCK_SPARSE,
        are_pairs=True,
    ),
    Architecture("qwen2", "qwen2"),
    Architecture(
        "qwen2moe",
        "qwen2_moe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 64,
        },
        {
            "expert_count": 4,
            "expert_used_count": 2,
            "expert_feed_forward_length": 32,
            "expert_shared_feed_forward_length": 64,
        },
        {
            "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
            "mlp.shared_expert.up_proj": "ffn_up_shexp",
            "mlp.shared_expert.down_proj": "ffn_down_shexp",
            "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
        },
    ),
    Architecture("qwen3", "qwen3", {"head_dim": 32}, {"attention.key_length": 32}),
    Architecture(
        "qwen3moe",
        "qwen3_moe",
        {
            "head_dim": 32,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        },
        {
            "attention.key_length": 32,
            "expert_count": 4,
            "expert_used_count": 2,
            "expert_feed_forward_length": 32,
        },
    ),
    Architecture(
        "gemma2",
        "gemma2",
        {
            "head_dim": 32,
            "query_pre_attn_scalar": 32,
            "attn_logit_softcapping": 40.0,
            "final_logit_softcapping": 20.0,
            "tie_word_embeddings": True,
        },
        {
            "attention.key_length": 32,
            "attention.value_length": 32,
            "attn_logit_softcapping": 40.0,
            "final_logit_softcapping": 20.0,
            "attention.sliding_window": 128,
        },
        _SANDWICH,
        norm_offset=1.0,
    ),
    Architecture(
        "gemma3",
        "gemma3_text",
        {
            "num_hidden_layers": 7,
            "head_dim": 32,
            "query_pre_attn_scalar": 32,
            "sliding_window": 8,
            "rope_scaling": {"type": "linear", "factor": 8.0},
            "tie_word_embeddings": True,
        },
        {
            "block_count": 7,
            "attention.key_length": 32,
            "attention.value_length": 32,
            "attention.sliding_window": 8,
            "rope.scaling.type": "linear",
            "rope.scaling.factor": 8.0,
        },
        _SANDWICH,
        norm_offset=1.0,
    ),
    Architecture(
        "phi3",
        "phi3",
        {
            "original_max_position_embeddings": 64,
            "partial_rotary_factor": 0.75,
            "head_dim": 32,
            "hidden_size": 128,
            "rope_scaling": {
                "type": "longrope",
                "long_factor": [1.0 + 0.25 * n for n in range(12)],
                "short_factor": [1.0] * 12,
                "original_max_position_embeddings": 64,
            },
        },
        {
            "embedding_length": 128,
            "rope.dimension_count": 24,
            "rope.scaling.original_context_length": 64,
            "attention.sliding_window": 200,
        },
        {"self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up"},
        extra={
            "rope_factors_long.weight": np.array([1.0 + 0.25 * n for n in range(12)], np.float32),
            "rope_factors_short.weight": np.ones(12, np.float32),
        },
    ),
    Architecture(
        "gpt-oss",
        "gpt_oss",
        {
            "intermediate_size": 32,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 8,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            },
            "layer_types": ["sliding_attention", "full_attention"],
        },
        {
            "attention.key_length": 16,
            "attention.sliding_window": 8,
            "expert_count": 4,
            "expert_used_count": 2,
            "expert_feed_forward_length": 32,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 64,
        },
        {
            "self_attn.sinks": "attn_sinks.weight",
            "post_attention_layernorm": "post_attention_norm",
            "mlp.router": "ffn_gate_inp",
            "mlp.experts.gate_proj": "ffn_gate_exps",
            "mlp.experts.up_proj": "ffn_up_exps",
            "mlp.experts.down_proj": "ffn_down_exps",
        },
    ),
    Architecture(
        "lfm2",
        "lfm2",
        {
            "block_dim": 64,
            "block_ff_dim": 96,
            "block_auto_adjust_ff_dim": False,
            "block_multiple_of": 256,
            "block_ffn_dim_multiplier": 1.0,
            "norm_eps": 1e-5,
            "conv_bias": False,
            "conv_L_cache": 3,
            "layer_types": ["conv", "full_attention"],
        },
        {"attention.head_count_kv": [0, 2], "shortconv.l_cache": 3},
        {
            "model.embedding_norm": "token_embd_norm",
            "operator_norm": "attn_norm",
            "ffn_norm": "ffn_norm",
            "self_attn.out_proj": "attn_output",
            "self_attn.q_layernorm": "attn_q_norm",
            "self_attn.k_layernorm": "attn_k_norm",
            "feed_forward.w1": "ffn_gate",
            "feed_forward.w2": "ffn_down",
            "feed_forward.w3": "ffn_up",
            "conv.conv": "shortconv.conv",
            "conv.in_proj": "shortconv.in_proj",
            "conv.out_proj": "shortconv.out_proj",
        },
    ),
    Architecture("granite", "granite", _GRANITE_CONFIG, _GRANITE_METADATA, are_pairs=True),
    Architecture(
        "granitemoe",
        "granitemoe",
        {**_GRANITE_CONFIG, "num_local_experts": 4, "num_experts_per_tok": 2},
        {**_GRANITE_METADATA, "expert_count": 4, "expert_used_count": 2},
        _BLOCK_SPARSE,
        are_pairs=True,
    ),
    Architecture(
        "glm4",
        "glm4",
        {"attention_bias": True, "partial_rotary_factor": 0.5, "rope_traditional": True},
        {"rope.dimension_count": 8, "attention.key_length": 16},
        {
            "mlp.gate_up_proj": "ffn_up",
            "post_self_attn_layernorm": "post_attention_norm",
            "post_mlp_layernorm": "post_ffw_norm",
        },
    ),
    Architecture(
        "deepseek2",
        "deepseek_v3",
        {**_LATENT_CONFIG, "q_lora_rank": 32, "norm_topk_prob": True},
        {
            **_LATENT_METADATA,
            "attention.q_lora_rank": 32,
            "attention.head_count_kv": 1,
            "attention.key_length": 48,
            "attention.value_length": 32,
            "attention.key_length_mla": 48,
            "attention.value_length_mla": 32,
            "expert_weights_norm": True,
            "expert_gating_func": 2,
        },
        _LATENT_NAMES,
    ),
    Architecture(
        "deepseek2",
        "deepseek_v2",
        {**_LATENT_CONFIG, "q_lora_rank": None, "topk_method": "greedy"},
        {
            **_LATENT_METADATA,
            "attention.head_count_kv": 2,
            "attention.key_length": 48,
            "attention.value_length": 32,
        },
        _LATENT_NAMES,
    ),
)


def in_gguf(path: str, names: Mapping[str, str]) -> str:
    """llama.cpp's name of a parameter."""
    known = {**NAMES, **names}
    layer = re.match(r"model\.layers\.(\d+)\.(.*)", path)
    before, inner = (f"blk.{layer[1]}.", layer[2]) if layer else ("", path)
    if inner in known:
        return before + known[inner]
    module, _, leaf = inner.rpartition(".")
    return f"{before}{known[module]}.{leaf}"


def build(
    one: Architecture,
    file: Path,
    kinds: Mapping[str, str] | None = None,
    change: Callable[[dict[str, Array]], None] | None = None,
) -> tuple[nn.Module, dict[str, Any]]:
    """mlx-lm's model with random weights, which are written to `file` as well.

    kinds: of blocks, by the ends of parameters' names; the weights are exact in them
    change: of the tensors before they are written
    """
    config = {**CONFIG, **one.config, "model_type": one.model_type}
    module = importlib.import_module(f"mlx_lm.models.{one.model_type}")
    model: nn.Module = module.Model(module.ModelArgs.from_dict(config))
    draw = np.random.default_rng(4)
    weights, tensors, written = {}, dict(one.extra), {}
    for path, array in tree_flatten(model.parameters()):
        if path.startswith("lm_head") and config["tie_word_embeddings"]:
            continue
        is_norm = "norm" in path
        values = draw.normal(is_norm, 0.1, array.shape).astype(np.float32)
        name = in_gguf(path, one.names)
        for end, kind in (kinds or {}).items():
            if path.endswith(end):
                quant = GGMLQuantizationType[kind]
                values = dequantize(quantize(values, quant), quant).astype(np.float32)
                written[name] = kind
        weights[path] = mx.array(values)
        if one.are_pairs and (".attn_q." in name or ".attn_k." in name):
            heads = "num_attention_heads" if ".attn_q." in name else "num_key_value_heads"
            values = in_pairs(values, config[heads])
        tensors[name] = _as_converted(name, values, one.norm_offset if is_norm else 0.0)
    if hasattr(model, "sanitize"):
        weights = model.sanitize(weights)
    model.load_weights(list(weights.items()))
    if change is not None:
        change(tensors)
    metadata = {**METADATA, **one.metadata, **byte_level_vocabulary()}
    write_gguf(file, one.name, metadata, tensors, written)
    return model, config


def _as_converted(name: str, values: Array, offset: float) -> Array:
    if name.endswith("shortconv.conv.weight"):
        return values[:, :, 0]  # mlx-lm's has the taps before an axis of one
    if name.endswith("ffn_gate_inp_shexp.weight"):
        return values[0]
    return values + np.float32(offset)

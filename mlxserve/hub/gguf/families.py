"""Maps llama.cpp's architectures to mlx-lm's, with their differences in file layout.

Data only. Metadata keys are llama.cpp's (gguf-py/gguf/constants.py), configuration keys those of
mlx-lm's `ModelArgs`, which are transformers'. Names of tensors come from
`gguf.get_tensor_name_map`, which knows transformers' names; `modules` has what mlx-lm calls
otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

COMMON_KEYS: Mapping[str, str] = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
    "expert_used_count": "num_experts_per_tok",
}
# Parts of a layer that mlx-lm calls otherwise than transformers.
COMMON_MODULES: Mapping[str, str] = {
    "switch_mlp.gate_proj": "ffn_gate_exps",
    "switch_mlp.up_proj": "ffn_up_exps",
    "switch_mlp.down_proj": "ffn_down_exps",
}


@dataclass(frozen=True, slots=True)
class Family:
    """The reading rules for files of one architecture.

    model_type   in mlx-lm
    keys         metadata keys beyond COMMON_KEYS, without the architecture's name before them
    fixed        configuration that llama.cpp's code has, not the file
    modules      ends of mlx-lm's names of parts of a layer, and llama.cpp's names of them
    swaps_pairs  rows of q and k are stored so that each rotated pair is adjacent
    norm_offset  what was added to the weights of norms
    is_bfloat16  activations may exceed float16
    """

    model_type: str
    keys: Mapping[str, str] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    modules: Mapping[str, str] = field(default_factory=dict)
    swaps_pairs: bool = False
    norm_offset: float = 0.0
    is_bfloat16: bool = False


_GEMMA = {
    "rope.freq_base_swa": "rope_local_base_freq",
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
_GRANITE = {
    "logit_scale": "logits_scaling",
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
}
_QWEN_MOE = {
    "expert_count": "num_experts",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
_DEEPSEEK = {
    "attention.q_lora_rank": "q_lora_rank",
    "attention.kv_lora_rank": "kv_lora_rank",
    "rope.dimension_count": "qk_rope_head_dim",
    "leading_dense_block_count": "first_k_dense_replace",
    "expert_count": "n_routed_experts",
    "expert_shared_count": "n_shared_experts",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_weights_scale": "routed_scaling_factor",
    "expert_weights_norm": "norm_topk_prob",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
}

FAMILIES: Mapping[str, Family] = {
    "llama": Family(
        "llama",
        {"expert_count": "num_local_experts"},
        swaps_pairs=True,
    ),
    "qwen2": Family("qwen2"),
    "qwen2moe": Family("qwen2_moe", _QWEN_MOE),
    "qwen3": Family("qwen3"),
    "qwen3moe": Family(
        "qwen3_moe",
        _QWEN_MOE,
        {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
    ),
    "gemma2": Family("gemma2", _GEMMA, norm_offset=1.0, is_bfloat16=True),
    "gemma3": Family("gemma3_text", _GEMMA, norm_offset=1.0, is_bfloat16=True),
    "phi3": Family("phi3"),
    "gpt-oss": Family(
        "gpt_oss",
        {
            "expert_count": "num_local_experts",
            "expert_feed_forward_length": "intermediate_size",
            "attention.sliding_window": "sliding_window",
        },
        modules={
            "mlp.experts.gate_proj": "ffn_gate_exps",
            "mlp.experts.up_proj": "ffn_up_exps",
            "mlp.experts.down_proj": "ffn_down_exps",
            "self_attn.sinks": "attn_sinks.weight",
        },
        is_bfloat16=True,
    ),
    "lfm2": Family(
        "lfm2",
        {
            "embedding_length": "block_dim",
            "feed_forward_length": "block_ff_dim",
            "attention.layer_norm_rms_epsilon": "norm_eps",
            "shortconv.l_cache": "conv_L_cache",
        },
        {
            "block_auto_adjust_ff_dim": False,
            "block_multiple_of": 256,
            "block_ffn_dim_multiplier": 1.0,
        },
    ),
    "granite": Family("granite", _GRANITE, swaps_pairs=True),
    "granitemoe": Family(
        "granitemoe", {**_GRANITE, "expert_count": "num_local_experts"}, swaps_pairs=True
    ),
    "glm4": Family("glm4"),
    "deepseek2": Family(
        "deepseek_v2",
        _DEEPSEEK,
        modules={
            "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
            "self_attn.embed_q": "attn_k_b",
            "self_attn.unembed_out": "attn_v_b",
        },
    ),
}

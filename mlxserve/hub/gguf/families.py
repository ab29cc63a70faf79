"""Maps llama.cpp's architectures to mlx-lm's: a row of data for each (`family.py`)."""

from __future__ import annotations

from collections.abc import Mapping

from mlxserve.hub.gguf.dense import DENSE
from mlxserve.hub.gguf.experts import EXPERTS
from mlxserve.hub.gguf.family import MINUS_ONE, SWAP_PAIRS, Family
from mlxserve.hub.gguf.recurrent import RECURRENT

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
    **DENSE,
    **EXPERTS,
    **RECURRENT,
    "llama": Family(
        "llama",
        {"expert_count": "num_local_experts"},
        actions=SWAP_PAIRS,
    ),
    "qwen2": Family("qwen2"),
    "qwen2moe": Family("qwen2_moe", _QWEN_MOE),
    "qwen3": Family("qwen3"),
    "qwen3moe": Family(
        "qwen3_moe",
        _QWEN_MOE,
        {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
    ),
    "gemma2": Family("gemma2", _GEMMA, actions=MINUS_ONE, is_bfloat16=True),
    "gemma3": Family("gemma3_text", _GEMMA, actions=MINUS_ONE, is_bfloat16=True),
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
    "granite": Family("granite", _GRANITE, actions=SWAP_PAIRS),
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

"""Rows of architectures with experts."""

from __future__ import annotations

from collections.abc import Mapping

from mlxserve.hub.gguf.actions import SwapPairs
from mlxserve.hub.gguf.family import SWAP_PAIRS, Family

# Names of transformers' options for the same values, of which each definition has its own.
SCALE = "expert_weights_scale"
NORM = "expert_weights_norm"
GLM_MOE = {
    "leading_dense_block_count": "first_k_dense_replace",
    "expert_count": "n_routed_experts",
    "expert_shared_count": "n_shared_experts",
    "expert_feed_forward_length": "moe_intermediate_size",
    SCALE: "routed_scaling_factor",
    NORM: "norm_topk_prob",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
}
_BAILING = {
    "leading_dense_block_count": "first_k_dense_replace",
    "expert_count": "num_experts",
    "expert_shared_count": "num_shared_experts",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "moe_shared_expert_intermediate_size",
    SCALE: "routed_scaling_factor",
    NORM: "norm_topk_prob",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
}
_GATE = {"mlp.gate.gate_proj": "ffn_gate_inp"}
_QWEN_3_MOE = {"expert_count": "num_experts", "expert_feed_forward_length": "moe_intermediate_size"}

EXPERTS: Mapping[str, Family] = {
    "glm4moe": Family(
        "glm4_moe",
        GLM_MOE,
        {"scoring_func": "sigmoid", "topk_method": "noaux_tc"},
        flags={"use_qk_norm": "blk.0.attn_q_norm.weight"},
    ),
    "ernie4_5-moe": Family(
        "ernie4_5_moe",
        {
            "expert_count": "moe_num_experts",
            "expert_used_count": "moe_k",
            "expert_feed_forward_length": "moe_intermediate_size",
            "expert_shared_count": "moe_num_shared_experts",
            "leading_dense_block_count": "moe_layer_start_index",
            "interleave_moe_layer_step": "moe_layer_interval",
        },
        flags={"use_bias": "blk.0.attn_output.bias"},
    ),
    "bailingmoe": Family(
        "bailing_moe",
        _BAILING,
        {"moe_router_enable_routed_scaling": False},
        modules={**_GATE, "attention.query_key_value": ("attn_q", "attn_k", "attn_v")},
        actions={
            "attention.query_key_value": (
                SwapPairs("num_attention_heads+num_key_value_heads", "head_dim"),
            )
        },
    ),
    "bailingmoe2": Family(
        "bailing_moe",
        _BAILING,
        modules={
            **_GATE,
            "mlp.gate.expert_bias": "exp_probs_b.bias",
            "attention.query_layernorm": "attn_q_norm",
            "attention.key_layernorm": "attn_k_norm",
        },
        flags={"use_qk_norm": "blk.0.attn_q_norm.weight"},
    ),
    "dots1": Family(
        "dots1",
        GLM_MOE,
        {"scoring_func": "noaux_tc"},
        {
            "mlp.experts.gate_proj": "ffn_gate_exps",
            "mlp.experts.up_proj": "ffn_up_exps",
            "mlp.experts.down_proj": "ffn_down_exps",
        },
    ),
    "olmoe": Family("olmoe", {"expert_count": "num_experts"}),
    "deepseek": Family("deepseek", GLM_MOE, actions=SWAP_PAIRS),
    "minimax-m2": Family(
        "minimax",
        {
            "expert_count": "num_local_experts",
            "expert_feed_forward_length": "intermediate_size",
            "rope.dimension_count": "rotary_dim",
        },
        {"shared_intermediate_size": 0},
        flags={"use_qk_norm": "blk.0.attn_q_norm.weight"},
    ),
    "lfm2moe": Family(
        "lfm2_moe",
        {
            "attention.layer_norm_rms_epsilon": "norm_eps",
            "shortconv.l_cache": "conv_L_cache",
            "expert_count": "num_experts",
            "expert_feed_forward_length": "moe_intermediate_size",
            "leading_dense_block_count": "num_dense_layers",
        },
        {"use_expert_bias": True, "norm_topk_prob": True, "tie_word_embeddings": True},
        {"feed_forward.expert_bias": "exp_probs_b.bias", "feed_forward.gate": "ffn_gate_inp"},
    ),
    "qwen3vlmoe": Family(
        "qwen3_vl_moe",
        _QWEN_3_MOE,
        {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
    ),
    "exaone-moe": Family(
        "exaone_moe",
        {
            **_QWEN_3_MOE,
            "expert_shared_count": "num_shared_experts",
            SCALE: "routed_scaling_factor",
            NORM: "norm_topk_prob",
            "expert_group_count": "n_group",
            "expert_group_used_count": "topk_group",
            "attention.sliding_window": "sliding_window",
        },
    ),
    "afmoe": Family(
        "afmoe",
        {
            **_QWEN_3_MOE,
            "expert_shared_count": "num_shared_experts",
            "leading_dense_block_count": "num_dense_layers",
            SCALE: "route_scale",
            NORM: "route_norm",
            "attention.sliding_window": "sliding_window",
        },
        {"score_func": "sigmoid", "mup_enabled": True},
        {
            "mlp.experts.gate_proj": "ffn_gate_exps",
            "mlp.experts.up_proj": "ffn_up_exps",
            "mlp.experts.down_proj": "ffn_down_exps",
            "mlp.router.gate": "ffn_gate_inp",
            "mlp.expert_bias": "exp_probs_b.bias",
        },
    ),
    "mimo2": Family(
        "mimo_v2_flash",
        {
            **GLM_MOE,
            "attention.layer_norm_rms_epsilon": "layernorm_epsilon",
            "attention.sliding_window": "sliding_window_size",
            "rope.freq_base_swa": "swa_rope_theta",
            "attention.value_length": "v_head_dim",
            "attention.value_scale": "attention_value_scale",
        },
        modules={"self_attn.attention_sink_bias": "attn_sinks.weight"},
    ),
    "granitemoe": Family(
        "granitemoe",
        {
            "logit_scale": "logits_scaling",
            "attention.scale": "attention_multiplier",
            "embedding_scale": "embedding_multiplier",
            "residual_scale": "residual_multiplier",
            "expert_count": "num_local_experts",
        },
        actions=SWAP_PAIRS,
    ),
}

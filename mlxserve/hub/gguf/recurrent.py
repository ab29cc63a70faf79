"""Rows of architectures with layers that keep a state."""

from __future__ import annotations

from collections.abc import Mapping

from mlxserve.hub.gguf.actions import GroupHeads, Interleave, NegativeLog
from mlxserve.hub.gguf.family import SWAP_PAIRS, Family

_DELTA_KEYS = {
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
    "full_attention_interval": "full_attention_interval",
}
_DELTA_MOE = {
    "expert_count": "num_experts",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
_HEADS = ("linear_num_key_heads", "linear_num_value_heads")
_KEYS = "linear_num_key_heads*linear_key_head_dim"
_VALUES = "linear_num_value_heads*linear_value_head_dim"
_GROUPED = GroupHeads(*_HEADS)
_GROUPED_AFTER_KEYS = GroupHeads(*_HEADS, (_KEYS, _KEYS))
_DELTA_ACTIONS = {
    "linear_attn.in_proj_qkv": (_GROUPED_AFTER_KEYS,),
    "linear_attn.in_proj_z": (_GROUPED,),
    "linear_attn.in_proj_a": (_GROUPED,),
    "linear_attn.in_proj_b": (_GROUPED,),
    "linear_attn.conv1d": (_GROUPED_AFTER_KEYS,),
    "linear_attn.dt_bias": (_GROUPED,),
    "linear_attn.A_log": (NegativeLog(), _GROUPED),
    "linear_attn.out_proj": (GroupHeads(*_HEADS, axis=-1),),
}
_MAMBA_KEYS = {
    "ssm.conv_kernel": "conv_kernel",
    "ssm.inner_size": "intermediate_size",
    "ssm.state_size": "state_size",
    "ssm.time_step_rank": "time_step_rank",
}
_GRANITE = {
    "logit_scale": "logits_scaling",
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
}
_NEMOTRON_KEYS = {
    "ssm.conv_kernel": "conv_kernel",
    "ssm.state_size": "ssm_state_size",
    "ssm.group_count": "n_groups",
    "ssm.time_step_rank": "mamba_num_heads",
    "attention.layer_norm_rms_epsilon": "layer_norm_epsilon",
}
_NEMOTRON_FLAGS = {"mlp_bias": "blk.0.ffn_up.bias", "use_bias": "blk.0.ssm_in.bias"}

RECURRENT: Mapping[str, Family] = {
    "qwen35": Family("qwen3_5", _DELTA_KEYS, actions=_DELTA_ACTIONS),
    "qwen35moe": Family("qwen3_5_moe", {**_DELTA_KEYS, **_DELTA_MOE}, actions=_DELTA_ACTIONS),
    "qwen3next": Family(
        "qwen3_next",
        {**_DELTA_KEYS, **_DELTA_MOE},
        {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
        {
            "linear_attn.in_proj_qkvz": ("attn_qkv", "attn_gate"),
            "linear_attn.in_proj_ba": "ssm_ba",
        },
        {"linear_attn.in_proj_qkvz": (Interleave(_HEADS[0], (_KEYS, _KEYS, _VALUES, _VALUES)),)},
    ),
    "nemotron_h": Family("nemotron_h", _NEMOTRON_KEYS, flags=_NEMOTRON_FLAGS),
    "nemotron_h_moe": Family(
        "nemotron_h",
        {
            **_NEMOTRON_KEYS,
            "expert_count": "n_routed_experts",
            "expert_shared_count": "n_shared_experts",
            "expert_feed_forward_length": "moe_intermediate_size",
            "expert_shared_feed_forward_length": "moe_shared_expert_intermediate_size",
            "expert_weights_norm": "norm_topk_prob",
            "expert_weights_scale": "routed_scaling_factor",
            "expert_group_count": "n_group",
            "expert_group_used_count": "topk_group",
            "moe_latent_size": "moe_latent_size",
        },
        modules={
            "mixer.switch_mlp.fc1": "ffn_up_exps",
            "mixer.switch_mlp.fc2": "ffn_down_exps",
            "mixer.shared_experts.up_proj": "ffn_up_shexp",
            "mixer.shared_experts.down_proj": "ffn_down_shexp",
            "mixer.gate": "ffn_gate_inp",
            "mixer.fc1_latent_proj": "ffn_latent_down",
            "mixer.fc2_latent_proj": "ffn_latent_up",
        },
        flags=_NEMOTRON_FLAGS,
    ),
    "granitehybrid": Family(
        "granitemoehybrid",
        {
            **_GRANITE,
            "expert_count": "num_local_experts",
            "expert_shared_feed_forward_length": "shared_intermediate_size",
            "ssm.conv_kernel": "mamba_d_conv",
            "ssm.state_size": "mamba_d_state",
            "ssm.group_count": "mamba_n_groups",
            "ssm.time_step_rank": "mamba_n_heads",
        },
        {"time_step_limit": [0.0, float("inf")], "mamba_proj_bias": False},
        {
            "shared_mlp.input_linear": ("ffn_gate_shexp", "ffn_up_shexp"),
            "block_sparse_moe.router.layer": "ffn_gate_inp",
        },
        SWAP_PAIRS,
        {"mamba_conv_bias": "blk.0.ssm_conv1d.bias"},
    ),
    "mamba": Family(
        "mamba",
        {
            **_MAMBA_KEYS,
            "attention.layer_norm_rms_epsilon": "mixer_rms_eps",
            "ssm.dt_b_c_rms": "use_bcdt_rms",
        },
        {"use_conv_bias": True, "use_bias": False},
    ),
    "mamba2": Family(
        "mamba2",
        {
            **_MAMBA_KEYS,
            "ssm.group_count": "n_groups",
            "ssm.time_step_rank": "num_heads",
            "attention.layer_norm_rms_epsilon": "layer_norm_epsilon",
        },
        {"time_step_limit": [0.0, float("inf")], "use_bias": False, "time_step_rank": "auto"},
        flags={"use_conv_bias": "blk.0.ssm_conv1d.bias"},
    ),
    "jamba": Family(
        "jamba",
        {
            "ssm.conv_kernel": "mamba_d_conv",
            "ssm.state_size": "mamba_d_state",
            "ssm.time_step_rank": "mamba_dt_rank",
        },
        {"num_experts": 1, "num_experts_per_tok": 1},
        flags={"mamba_conv_bias": "blk.0.ssm_conv1d.bias"},
    ),
    "falcon-h1": Family(
        "falcon_h1",
        {
            "ssm.conv_kernel": "mamba_d_conv",
            "ssm.state_size": "mamba_d_state",
            "ssm.group_count": "mamba_n_groups",
            "ssm.time_step_rank": "mamba_n_heads",
            "ssm.inner_size": "mamba_d_ssm",
        },
        # The converter multiplies all of these into weights.
        {
            **dict.fromkeys(
                (
                    "attention_in_multiplier",
                    "attention_out_multiplier",
                    "embedding_multiplier",
                    "key_multiplier",
                    "lm_head_multiplier",
                    "ssm_in_multiplier",
                    "ssm_out_multiplier",
                ),
                1.0,
            ),
            "mlp_multipliers": [1.0, 1.0],
            "ssm_multipliers": [1.0] * 5,
            "projectors_bias": False,
            "mamba_proj_bias": False,
        },
        flags={"mamba_rms_norm": "blk.0.ssm_norm.weight"},
    ),
}

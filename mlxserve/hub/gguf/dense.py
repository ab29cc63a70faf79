"""Rows of architectures without experts."""

from __future__ import annotations

from collections.abc import Mapping

from mlxserve.hub.gguf.actions import Interleave, Plus, SwapPairs, TensorPart
from mlxserve.hub.gguf.family import MINUS_ONE, SWAP_PAIRS, Family

LAYER_NORM = "attention.layer_norm_epsilon"
_QKV = (
    "num_attention_heads*head_dim",
    "num_key_value_heads*head_dim",
    "num_key_value_heads*head_dim",
)
_ALTUP = {
    "altup_projections": "altup_proj",
    "altup_unembed_projections": "altup_unembd_proj",
}
_GPT_MODULES = {
    "model.wte": "token_embd",
    "model.wpe": "position_embd",
    "model.ln_f": "output_norm",
    "ln_1": "attn_norm",
    "ln_2": "ffn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}
_GPT_KEYS = {
    "embedding_length": "n_embd",
    "block_count": "n_layer",
    "attention.head_count": "n_head",
    "context_length": "n_positions",
    LAYER_NORM: "layer_norm_epsilon",
}

DENSE: Mapping[str, Family] = {
    "gemma": Family("gemma", actions=MINUS_ONE, is_bfloat16=True),
    "gemma3n": Family(
        "gemma3n",
        {
            "attention.sliding_window": "sliding_window",
            "rope.freq_base_swa": "rope_local_base_freq",
            "final_logit_softcapping": "final_logit_softcapping",
            "embedding_length_per_layer_input": "hidden_size_per_layer_input",
            "attention.shared_kv_layers": "num_kv_shared_layers",
            "altup.active_idx": "altup_active_idx",
            "altup.num_inputs": "altup_num_inputs",
        },
        modules={
            "altup.correct_output_scale": "altup_correct_scale.weight",
            **{f"{mine}.{number}": stem for mine, stem in _ALTUP.items() for number in range(3)},
        },
        actions={
            f"{mine}.{number}": (TensorPart(number, ("1", "1", "1")),)
            for mine in _ALTUP
            for number in range(3)
        },
        is_bfloat16=True,
    ),
    "gemma4": Family(
        "gemma4_text",
        {
            "attention.sliding_window": "sliding_window",
            "final_logit_softcapping": "final_logit_softcapping",
            "embedding_length_per_layer_input": "hidden_size_per_layer_input",
            "attention.shared_kv_layers": "num_kv_shared_layers",
            "attention.key_length": "global_head_dim",
            "attention.key_length_swa": "head_dim",
            "expert_count": "num_experts",
            "expert_used_count": "top_k_experts",
            "expert_feed_forward_length": "moe_intermediate_size",
        },
        modules={
            "layer_scalar": "layer_output_scale.weight",
            "router.proj": "ffn_gate_inp",
            "router.scale": "ffn_gate_inp.scale",
            "router.per_expert_scale": "ffn_down_exps.scale",
            "switch_glu.gate_proj": "ffn_gate_up_exps",
            "switch_glu.up_proj": "ffn_gate_up_exps",
            "switch_glu.down_proj": "ffn_down_exps",
        },
        actions={
            "switch_glu.gate_proj": (TensorPart(0, ("moe_intermediate_size",) * 2, -2),),
            "switch_glu.up_proj": (TensorPart(1, ("moe_intermediate_size",) * 2, -2),),
        },
        flags={"enable_moe_block": "blk.0.ffn_gate_inp.weight"},
        # A full layer without values of its own has its keys for them.
        without={"attention_k_eq_v": ("attn_k", "attn_v")},
        drops=("attn_k", "attn_v", "attn_k_norm"),
        is_bfloat16=True,
    ),
    "mistral3": Family(
        "ministral3",
        {"attention.temperature_scale": "llama_4_scaling_beta"},
        actions=SWAP_PAIRS,
    ),
    "smollm3": Family("smollm3", actions=SWAP_PAIRS),
    "seed_oss": Family("seed_oss"),
    "olmo2": Family("olmo2"),
    "cohere2": Family(
        "cohere2",
        {
            LAYER_NORM: "layer_norm_eps",
            "logit_scale": "logit_scale",
            "attention.sliding_window": "sliding_window",
        },
        {"sliding_window_pattern": 4},
    ),
    "command-r": Family(
        "cohere",
        {LAYER_NORM: "layer_norm_eps", "logit_scale": "logit_scale"},
        flags={"use_qk_norm": "blk.0.attn_q_norm.weight"},
    ),
    "phi2": Family("phi", {LAYER_NORM: "layer_norm_eps"}),
    "starcoder2": Family("starcoder2", {LAYER_NORM: "norm_epsilon"}),
    "stablelm": Family(
        "stablelm",
        {LAYER_NORM: "layer_norm_eps", "use_parallel_residual": "use_parallel_residual"},
        flags={"use_qkv_bias": "blk.0.attn_q.bias"},
    ),
    "exaone": Family(
        "exaone",
        {
            "block_count": "num_layers",
            "attention.layer_norm_rms_epsilon": "layer_norm_epsilon",
        },
    ),
    "exaone4": Family("exaone4", {"attention.sliding_window": "sliding_window"}),
    "internlm2": Family(
        "internlm2",
        modules={"attention.wqkv": ("attn_q", "attn_k", "attn_v")},
        actions={
            "attention.wqkv": (
                SwapPairs("num_attention_heads+num_key_value_heads", "head_dim"),
                Interleave("num_key_value_heads", _QKV),
            )
        },
        flags={"bias": "blk.0.attn_q.bias"},
    ),
    "minicpm": Family("minicpm", {"embedding_scale": "scale_emb"}, actions=SWAP_PAIRS),
    "nemotron": Family(
        "nemotron", {LAYER_NORM: "norm_eps"}, {"hidden_act": "relu2"}, actions=MINUS_ONE
    ),
    "hunyuan-dense": Family("hunyuan_v1_dense", flags={"use_qk_norm": "blk.0.attn_q_norm.weight"}),
    "ernie4_5": Family("ernie4_5", flags={"use_bias": "blk.0.attn_output.bias"}),
    "qwen": Family(
        "qwen",
        {
            "attention.layer_norm_rms_epsilon": "layer_norm_epsilon",
            "rope.dimension_count": "kv_channels",
        },
    ),
    "qwen2vl": Family("qwen2_vl"),
    "qwen3vl": Family("qwen3_vl"),
    "gpt2": Family("gpt2", _GPT_KEYS, modules=_GPT_MODULES),
    "starcoder": Family("gpt_bigcode", {**_GPT_KEYS, "feed_forward_length": "n_inner"}),
    "gptneox": Family(
        "gpt_neox",
        {LAYER_NORM: "layer_norm_eps", "use_parallel_residual": "use_parallel_residual"},
        modules={
            "model.embed_in": "token_embd",
            "model.embed_out": "output",
            "model.final_layer_norm": "output_norm",
            "attention.query_key_value": "attn_qkv",
            "attention.dense": "attn_output",
            "mlp.dense_h_to_4h": "ffn_up",
            "mlp.dense_4h_to_h": "ffn_down",
            "input_layernorm": "attn_norm",
            "post_attention_layernorm": "ffn_norm",
        },
        actions={"attention.query_key_value": (Interleave("num_attention_heads", _QKV),)},
    ),
    "plamo3": Family(
        "plamo3",
        {
            "attention.sliding_window": "window_size",
            "rope.freq_base_swa": "rope_local_theta",
            "attention.sliding_window_pattern": "sliding_window_pattern",
        },
        # Its norms have something added to their weights, and the file the sum.
        actions={
            "post_mixer_norm.weight": (Plus(-1 / 5),),
            "post_mlp_norm.weight": (Plus(-1 / 5**1.5),),
            **MINUS_ONE,
        },
    ),
}

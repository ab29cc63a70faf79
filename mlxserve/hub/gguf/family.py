"""What a row of data says about the files of one architecture.

Metadata keys are llama.cpp's (gguf-py/gguf/constants.py), configuration keys those of mlx-lm's
`ModelArgs`, which are transformers'. Names of tensors come from `gguf.get_tensor_name_map`, which knows
transformers' names; `modules` has what mlx-lm calls otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mlxserve.hub.gguf.actions import Action, NegativeLog, Plus, SwapPairs

# llama.cpp's names of the tensors that a part is made of: several are joined by their rows.
Source = str | tuple[str, ...]
Actions = tuple[Action, ...]

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
COMMON_MODULES: Mapping[str, Source] = {
    "switch_mlp.gate_proj": "ffn_gate_exps",
    "switch_mlp.up_proj": "ffn_up_exps",
    "switch_mlp.down_proj": "ffn_down_exps",
    "e_score_correction_bias": "exp_probs_b.bias",
    "dt_bias": "ssm_dt.bias",
    "A_log": "ssm_a",
}
COMMON_FLAGS: Mapping[str, str] = {
    "attention_bias": "blk.0.attn_q.bias",
    "mlp_bias": "blk.0.ffn_up.bias",
}
COMMON_ACTIONS: Mapping[str, Actions] = {"A_log": (NegativeLog(),)}


@dataclass(frozen=True, slots=True)
class Family:
    """The reading rules for files of one architecture.

    model_type   in mlx-lm
    keys         metadata keys beyond COMMON_KEYS, without the architecture's name before them
    fixed        configuration that llama.cpp's code has, not the file
    modules      ends of mlx-lm's names of parts, and llama.cpp's names of them: within a layer, or without one
                 those of the whole model
    actions      by ends of mlx-lm's names; of several the first that fits
    flags        options that are true where the file has the tensor
    without      options that are true where a layer has the first tensor and not the second one
    drops        tensors that a definition need not have in every layer, by llama.cpp's names
    is_bfloat16  activations may exceed float16
    """

    model_type: str
    keys: Mapping[str, str] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    modules: Mapping[str, Source] = field(default_factory=dict)
    actions: Mapping[str, Actions] = field(default_factory=dict)
    flags: Mapping[str, str] = field(default_factory=dict)
    without: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    drops: tuple[str, ...] = ()
    is_bfloat16: bool = False

    def actions_of(self, path: str) -> Actions:
        """Return the actions on a parameter of the model."""
        module = path.rpartition(".")[0]
        for end, actions in {**self.actions, **COMMON_ACTIONS}.items():
            if path.endswith(end) or module.endswith(end):
                return actions
        return ()


MINUS_ONE: Mapping[str, Actions] = {"norm.weight": (Plus(-1.0),)}
SWAP_PAIRS: Mapping[str, Actions] = {
    "self_attn.q_proj": (SwapPairs("num_attention_heads"),),
    "self_attn.k_proj": (SwapPairs("num_key_value_heads"),),
}

"""What llama.cpp's architectures are called in mlx-lm, and how their files differ from each other.

Data only. Metadata keys are llama.cpp's (gguf-py/gguf/constants.py), configuration keys those of mlx-lm's
`ModelArgs`, which are transformers'. Names of tensors come from `gguf.get_tensor_name_map`, which knows
transformers' names; `modules` has what mlx-lm calls otherwise.
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
}


@dataclass(frozen=True, slots=True)
class Family:
    """How files of an architecture are read.

    model_type   in mlx-lm
    keys         metadata keys beyond COMMON_KEYS, without the architecture's name before them
    fixed        configuration that llama.cpp's code has, not the file
    swaps_pairs  rows of q and k are stored so that each rotated pair is adjacent
    """

    model_type: str
    keys: Mapping[str, str] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    swaps_pairs: bool = False


FAMILIES: Mapping[str, Family] = {
    "llama": Family("llama", {"rope.dimension_count": "head_dim"}, swaps_pairs=True),
}

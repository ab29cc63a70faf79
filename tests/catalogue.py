"""Rewrites `mlxserve/hub/catalogue.toml`: shapes from config.json files, sizes from mlx-lm's definitions.

    python -m tests.catalogue [FOLDER]

FOLDER has a config.json for each repository that is refreshed, as FOLDER/OWNER/NAME/config.json: what such a file says
replaces the shape of its model. Everything else of the catalogue stays as it is written. Without a folder only the sizes
are computed again. It prints README's table.
"""

from __future__ import annotations

import json
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.utils import _get_classes

from mlxserve.hub.known_models import known_models
from mlxserve.hub.recommendation import recommend
from tests.memory_table import mac

FILE: Final = Path(__file__).parent.parent / "mlxserve" / "hub" / "catalogue.toml"
_WIDTH: Final = 100
_MEMORIES: Final = (8, 16, 24, 32, 64)  # GB, of README's table
_MOST_OTHERS: Final = 4
# The chip of such a Mac whose column of docs/models.md README's table shows.
_CHIPS: Final = {8: "M1", 16: "M1", 24: "M5", 32: "M2 Pro", 64: "M3 Max"}
_PAGE: Final = Path(__file__).parent.parent / "docs" / "models.md"
# What a shape keeps of a config.json: numbers that decide how much memory a model takes.
_NAMES: Final = frozenset(
    {
        *("model_type", "tie_word_embeddings", "vocab_size", "hidden_size", "intermediate_size"),
        *("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"),
        *("max_position_embeddings", "sliding_window", "sliding_window_pattern", "layer_types"),
        *("full_attention_interval", "full_attn_idxs", "hybrid_override_pattern"),
        *("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim"),
        *("linear_value_head_dim", "linear_conv_kernel_dim", "num_experts", "num_local_experts"),
        *("n_routed_experts", "n_shared_experts", "num_experts_per_tok", "top_k_experts"),
        *("num_dense_layers", "first_k_dense_replace", "moe_intermediate_size"),
        *("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"),
        *("shared_intermediate_size", "decoder_sparse_step", "mlp_only_layers"),
        *("enable_moe_block", "kv_lora_rank", "q_lora_rank", "qk_rope_head_dim"),
        *("qk_nope_head_dim", "v_head_dim", "global_head_dim", "num_global_key_value_heads"),
        *("attention_k_eq_v", "num_kv_shared_layers", "hidden_size_per_layer_input"),
        *("vocab_size_per_layer_input", "use_double_wide_mlp", "laurel_rank", "altup_num_inputs"),
        *("block_dim", "block_ff_dim", "block_multiple_of", "block_ffn_dim_multiplier"),
        *("block_auto_adjust_ff_dim", "conv_L_cache", "mamba_num_heads", "mamba_head_dim"),
        *("ssm_state_size", "conv_kernel", "n_groups", "mamba_n_heads", "mamba_d_head"),
        *("mamba_d_state", "mamba_n_groups", "mamba_d_conv", "partial_rotary_factor"),
        *("rotary_dim",),
    }
)
_QUANTISED: Final = ("bits", "group_size")
# What definitions require beside it, and no size depends on.
_OTHERS: Final[Mapping[str, Any]] = {
    **dict.fromkeys(("rms_norm_eps", "norm_eps", "layer_norm_epsilon"), 1e-6),
    **dict.fromkeys(
        ("attention_bias", "mlp_bias", "conv_bias", "use_bias", "mamba_proj_bias"), False
    ),
    **dict.fromkeys(("use_conv_bias", "mamba_conv_bias", "norm_topk_prob"), True),
    **dict.fromkeys(("embedding_multiplier", "attention_multiplier", "logits_scaling"), 1.0),
    **dict.fromkeys(("residual_multiplier", "routed_scaling_factor", "altup_coef_clip"), 1.0),
    **dict.fromkeys(("rope_theta", "rope_local_base_freq"), 1e6),
    **dict.fromkeys(("n_group", "topk_group"), 1),
    "use_expert_bias": True,
    "use_qk_norm": False,
    "partial_rotary_factor": 0.25,
    "rotary_dim": 64,
    "rope_scaling": None,
    "final_logit_softcapping": 30.0,
    "altup_active_idx": 0,
    "altup_correct_scale": True,
    "query_pre_attn_scalar": 256,
    "time_step_limit": [0.0, 1e9],
    "activation_sparsity_pattern": [0.0] * 100,
    "rope_parameters": {
        "rope_theta": 1e6,
        "llama_4_scaling_beta": 0.1,
        "original_max_position_embeddings": 4096,
    },
}
# Definitions that have a rotation of their own where the config names none.
_KEEP_OWN_ROTATION: Final = ("gemma", "qwen3_5", "qwen3_vl")


def read() -> dict[str, Any]:
    return tomllib.loads(FILE.read_text(encoding="utf-8"))


def built(shape: Mapping[str, Any]) -> nn.Module:
    """Return the definition's model with this shape, of which nothing is computed."""
    definition, arguments = _get_classes(config=dict(shape))
    model: nn.Module = definition(arguments.from_dict(completed(shape)))
    return model


def quantised(shape: Mapping[str, Any], model: Mapping[str, Any]) -> nn.Module:
    """Return the definition's model with the weights' format that a row of the catalogue has."""
    text_model = built(shape)
    text_model.set_dtype(mx.bfloat16)
    if (bits := model["bits"]) < 16:
        mode = model.get("mode", "affine")
        group = {"group_size": model["group_size"], "bits": bits, "mode": mode}
        _quantise(text_model, group, model.get("experts"))
    return text_model


def weight_size(shape: Mapping[str, Any], model: Mapping[str, Any]) -> int:
    """Bytes of the weights of a text model, from its definition."""
    text_model = quantised(shape, model)
    text = shape.get("text_config", shape)
    is_tied = text.get("tie_word_embeddings", "gemma" in shape["model_type"])
    return sum(
        array.nbytes
        for name, array in tree_flatten(text_model.parameters())
        if not (is_tied and "lm_head" in name)
    )


def _quantise(text_model: nn.Module, group: dict[str, Any], experts: str | None) -> None:
    own = getattr(text_model, "quant_predicate", None)

    def chosen(path: str, module: nn.Module) -> bool | dict[str, Any]:
        if not hasattr(module, "to_quantized") or module.weight.shape[-1] % group["group_size"]:
            return False
        if experts and ".experts." in path:
            return {"group_size": 32, "bits": 4, "mode": experts}
        decided = True if own is None else own(path, module)
        return decided if isinstance(decided, bool) or group["mode"] == "affine" else True

    nn.quantize(text_model, **group, class_predicate=chosen)


def completed(shape: Mapping[str, Any]) -> dict[str, Any]:
    """Add what the definition requires and the catalogue leaves out."""
    others = dict(_OTHERS)
    if shape["model_type"].startswith(_KEEP_OWN_ROTATION):
        del others["rope_parameters"]
    whole = {**others, **shape}
    if "text_config" in shape:
        whole["text_config"] = {**others, **shape["text_config"]}
    return whole


def refreshed(catalogue: dict[str, Any], folder: Path | None) -> dict[str, Any]:
    """Return the catalogue with what a folder's config.json files say, and all sizes computed."""
    models = [model for model in catalogue["models"] if "shape" in model]
    for model in models:
        file = None if folder is None else folder / model["repository"] / "config.json"
        if file is not None and file.is_file():
            config = json.loads(file.read_text(encoding="utf-8"))
            catalogue["shapes"][model["shape"]] = _shape(config)
            quantised = config.get("quantization", {})
            model.update({name: quantised[name] for name in _QUANTISED if name in quantised})
    for model in models:
        model["weight_size"] = weight_size(catalogue["shapes"][model["shape"]], model)
    return catalogue


def _shape(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the catalogue keeps of a config.json."""
    shape = {
        name: config[name] for name in sorted(config) if name in _NAMES and config[name] is not None
    }
    if isinstance(text := config.get("text_config"), Mapping):
        shape["text_config"] = _shape(text)
    return shape


def render(catalogue: Mapping[str, Any], opening: str) -> str:
    """Return the catalogue as TOML, after the comment that it begins with."""
    lines = [opening.rstrip()]
    for model in catalogue["models"]:
        lines += ["", "[[models]]", *_assignments(model)]
    for name, shape in sorted(catalogue["shapes"].items()):
        text = shape.get("text_config")
        lines += ["", f'[shapes."{name}"]', *_assignments(shape)]
        if text is not None:
            lines += ["", f'[shapes."{name}".text_config]', *_assignments(text)]
    return "\n".join(lines) + "\n"


def _assignments(table: Mapping[str, Any]) -> list[str]:
    return [
        line
        for name, value in table.items()
        if not isinstance(value, Mapping)
        for line in _assignment(name, value)
    ]


def _assignment(name: str, value: Any) -> list[str]:
    """`name = value`, with the items of a long list on lines of their own."""
    if isinstance(value, int) and not isinstance(value, bool):
        return [f"{name} = {value:_}"]
    line = f"{name} = {json.dumps(value)}"
    if not isinstance(value, list) or len(line) <= _WIDTH:
        return [line]
    lines = [f"{name} = ["]
    row = "   "
    for item in map(json.dumps, value):
        if len(row) + len(item) + 2 > _WIDTH:
            lines.append(row)
            row = "   "
        row += f" {item},"
    return [*lines, row, "]"]


def models_table() -> str:
    """README's table: what suits Macs of these sizes, in Markdown."""
    lines = [
        "| Memory | Best | Faster | Tokens/s of both, computed | Also |",
        "|---|---|---|---|---|",
    ]
    for memory in _MEMORIES:
        suited = recommend(mac(memory).limit(), is_metal=True)
        assert suited.best is not None
        assert suited.faster is not None
        others = ", ".join(map(_code, suited.others[:_MOST_OTHERS]))
        both = _code(suited.best), _code(suited.faster)
        speeds = ", ".join(_speed(_CHIPS[memory], name.strip("`")) for name in both)
        lines.append(
            f"| {memory} GB | {' | '.join(both)} | {speeds} ({_CHIPS[memory]}) | {others} |"
        )
    return "\n".join(lines) + "\n"


def _speed(chip: str, model: str) -> str:
    """Tokens/s after 8,192 tokens, as docs/models.md has them from the model of costs."""
    for line in _PAGE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if cells[1:2] == [model] and cells[0].startswith(f"{chip}, "):
            return cells[3]
    raise LookupError(f"{_PAGE} has no row of {chip} and {model}")


def _code(repository: str) -> str:
    return f"`{known_models()[repository].names[0]}`"


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else None
    written = FILE.read_text(encoding="utf-8")
    opening = written[: written.index("[[models]]")]
    FILE.write_text(render(refreshed(read(), folder), opening), encoding="utf-8")
    known_models.cache_clear()
    print(models_table(), end="")


if __name__ == "__main__":
    main()

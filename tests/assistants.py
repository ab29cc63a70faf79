"""Small assistants of Gemma 4 with random weights, for the tiny `gemma4_text` of these tests."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten, tree_map, tree_unflatten

from mlxserve.hub.embedded import model_path
from mlxserve.model.drafting import load_assistant
from mlxserve.model.drafting.assistant_model import AssistantArgs, AssistantModel
from mlxserve.scheduler.draft_controller import DraftController

SIZE = 64  # of the assistant's own hidden states


def assistant_config(target: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    """A config.json of an assistant that fits a model with the text configuration `target`."""
    text = {
        "model_type": "gemma4_text",
        "hidden_size": SIZE,
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": target["num_key_value_heads"],
        "head_dim": target["head_dim"],
        "global_head_dim": target["global_head_dim"],
        "sliding_window": target["sliding_window"],
        "rope_parameters": target["rope_parameters"],
        "rms_norm_eps": target["rms_norm_eps"],
        "vocab_size": target["vocab_size"],
        "max_position_embeddings": target["max_position_embeddings"],
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0,
        "final_logit_softcapping": None,
        "use_double_wide_mlp": False,
        "enable_moe_block": False,
        "attention_k_eq_v": False,
        "num_kv_shared_layers": 3,
    }
    config = {
        "model_type": "gemma4_assistant",
        "architectures": ["Gemma4AssistantForCausalLM"],
        "backbone_hidden_size": target["hidden_size"],
        "use_ordered_embeddings": False,
        "num_centroids": 2048,
        "centroid_intermediate_top_k": 32,
        "tie_word_embeddings": True,
    }
    own = {name: changes.pop(name) for name in tuple(changes) if name in config}
    return {**config, **own, "text_config": {**text, **changes}}


def random_weights(config: Mapping[str, Any], seed: int = 7) -> dict[str, mx.array]:
    """Random float32 weights under the names of a published checkpoint."""
    mx.random.seed(seed)
    model = AssistantModel(AssistantArgs.from_dict(config))

    def draw(array: mx.array) -> mx.array:
        if not mx.issubdtype(array.dtype, mx.floating):
            return mx.random.permutation(array.size).astype(mx.int64)
        noise = mx.random.normal(array.shape)
        return noise * 0.3 + 1.0 if array.ndim <= 1 else noise * array.shape[-1] ** -0.5

    return dict(tree_flatten(tree_map(draw, model.parameters())))


def write_assistant(folder: Path, target: Path, **changes: Any) -> Path:
    """Write a random assistant for the model in `target`, as it is published; `changes` to its configuration."""
    folder.mkdir(parents=True, exist_ok=True)
    config = assistant_config(json.loads((target / "config.json").read_text()), **changes)
    (folder / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(
        str(folder / "model.safetensors"), random_weights(config), metadata={"format": "pt"}
    )
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model_path() / name, folder / name)
    return folder


def read_assistant(folder: Path) -> AssistantModel:
    """The model in a folder that `write_assistant` has written."""
    model = AssistantModel(
        AssistantArgs.from_dict(json.loads((folder / "config.json").read_text()))
    )
    weights = dict(mx.load(str(folder / "model.safetensors")))
    model.update(tree_unflatten(list(model.sanitize(weights).items())))
    return model


def write_agreeing_pair(folder: Path, target: Path) -> tuple[Path, Path]:
    """Write (a copy of `target`, an assistant that mostly guesses its tokens, as both look at the last token most)."""
    own = folder / "target"
    shutil.copytree(target, own)
    weights = dict(mx.load(str(own / "model.safetensors")))
    for name, array in weights.items():
        if any(part in name for part in ("o_proj", "down_proj", "post_")) and array.ndim <= 2:
            weights[name] = array * 0.3
    mx.save_safetensors(str(own / "model.safetensors"), weights, metadata={"format": "mlx"})
    assistant = write_assistant(folder / "assistant", own)
    guessing = dict(mx.load(str(assistant / "model.safetensors")))
    for name, array in guessing.items():
        if any(part in name for part in ("post_attention_layernorm", "post_feedforward_layernorm")):
            guessing[name] = mx.zeros_like(array)
    shared = {name: weights[name] for name in ("model.embed_tokens.weight", "model.norm.weight")}
    identity = mx.eye(SIZE)
    projection = mx.concatenate([identity, mx.zeros_like(identity)], axis=1)
    guessing |= {**shared, "pre_projection.weight": projection}
    mx.save_safetensors(str(assistant / "model.safetensors"), guessing, metadata={"format": "pt"})
    return own, assistant


@pytest.fixture
def unprobed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take assistants that guess nothing right, as random ones do."""
    monkeypatch.setattr(load_assistant, "MIN_SHARE", 0.0)


@contextmanager
def always_drafting() -> Iterator[None]:
    """Draft as many tokens as there is room for in every step, whatever is accepted."""

    def plan(
        _: object, num_decodes: int, longest: Mapping[Any, int], max_tokens: int
    ) -> dict[Any, int]:
        lengths, left = {}, max_tokens
        for answer, length in longest.items():
            lengths[answer] = min(length, left)
            left -= lengths[answer]
        return {answer: length for answer, length in lengths.items() if length}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DraftController, "pays", lambda _, _num, longest: bool(longest))
        patch.setattr(DraftController, "plan", plan)
        yield

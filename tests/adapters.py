"""Adapters of small models, and mlx-lm's own layers as what they are compared with."""

from __future__ import annotations

import json
import types
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm import lora
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tuner.utils import linear_to_lora_layers, load_adapters
from mlx_lm.utils import load_model

TINY = 0.05  # of random matrices: with a scale of 20 it changes most tokens of a small model


def write_adapter(
    folder: Path,
    base: Path,
    *,
    seed: int,
    rank: int = 8,
    scale: float = 20.0,
    num_layers: int | None = None,
    keys: tuple[str, ...] = (),
    **config: Any,
) -> Path:
    """Random matrices of the model in `base`, in the format of `mlx_lm.lora`.

    keys: paths of the only layers to change; in the last `num_layers` blocks, or all of them
    """
    model, _ = load_model(base)
    parameters: dict[str, Any] = {"rank": rank, "scale": scale, "dropout": 0.0}
    if keys:
        parameters["keys"] = list(keys)
    num_layers = num_layers or len(model.layers)
    linear_to_lora_layers(model, num_layers, parameters)
    mx.random.seed(seed)
    arrays = {
        name: mx.random.normal(array.shape) * TINY
        for name, array in tree_flatten(model.parameters())
        if name.endswith((".lora_a", ".lora_b"))
    }
    folder.mkdir()
    mx.save_safetensors(str(folder / "adapters.safetensors"), arrays)
    content = {
        "model": str(base),
        "fine_tune_type": "lora",
        "num_layers": num_layers,
        "lora_parameters": parameters,
        **config,
    }
    (folder / "adapter_config.json").write_text(json.dumps(content))
    return folder


def train_adapter(folder: Path, base: Path) -> Path:
    """What `mlx_lm.lora --train` writes after four steps."""
    data = folder.with_name(f"{folder.name}-data")
    data.mkdir()
    lines = "\n".join(json.dumps({"text": f"The answer is {n}, as ever."}) for n in range(8))
    for name in ("train", "valid"):
        (data / f"{name}.jsonl").write_text(lines)
    asked = {
        "model": str(base),
        "train": True,
        "data": str(data),
        "adapter_path": str(folder),
        "iters": 4,
        "batch_size": 2,
        "num_layers": 2,
        "val_batches": 1,
        "learning_rate": 3e-2,
    }
    lora.run(types.SimpleNamespace(**{**lora.CONFIG_DEFAULTS, **asked}))
    return folder


def dense_tokens(
    base: Path, adapter: Path | None, prompts: list[list[int]], num_tokens: int
) -> list[tuple[int, ...]]:
    """Greedy tokens of mlx-lm's dense path with its own LoRALinear, in float32."""
    model, _ = load_model(base)
    if adapter is not None:
        load_adapters(model, str(adapter))
    model.eval()
    model.set_dtype(mx.float32)
    answers = []
    for prompt in prompts:
        cache, ids, answer = make_prompt_cache(model), mx.array([prompt]), []
        for _ in range(num_tokens):
            answer.append(int(mx.argmax(model(ids, cache=cache)[0, -1])))
            ids = mx.array([answer[-1:]])
        answers.append(tuple(answer))
    return answers


def fuse(model: Any, adapter: Path) -> None:
    """Add an adapter to the weights of the linear layers that it changes."""
    arrays = mx.load(str(adapter / "adapters.safetensors"))
    assert isinstance(arrays, dict)
    scale = json.loads((adapter / "adapter_config.json").read_text())["lora_parameters"]["scale"]
    modules = dict(model.named_modules())
    for path in {name.rpartition(".")[0] for name in arrays}:
        modules[path].weight += scale * _change(arrays[f"{path}.lora_a"], arrays[f"{path}.lora_b"])


def _change(a: mx.array, b: mx.array) -> mx.array:
    """(outputs, inputs), or of each expert."""
    if b.ndim == 3:
        return b @ a.reshape(len(b), -1, a.shape[-1])
    return (a @ b).T

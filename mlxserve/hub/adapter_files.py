"""Find and check the LoRA adapters of a model: folders written by `mlx_lm.lora`. Never imports mlx.

    adapter_config.json     {"fine_tune_type": "lora", "lora_parameters": {"rank": 8, "scale": 20.0}, ...}
    adapters.safetensors    {"model.layers.0.self_attn.q_proj.lora_a": (input, rank), ....lora_b: (rank, output)}

Only these two files are read. `model/adapters.py` checks that the model has these layers when it is
loaded.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any

from mlxserve.core.errors import ModelNotFound, UnsupportedModel
from mlxserve.hub.headers import read_shapes
from mlxserve.system.files import MAX_TEXT, open_regular, read_json

CONFIG, WEIGHTS = "adapter_config.json", "adapters.safetensors"
_PEFT_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
_SIDES = ("lora_a", "lora_b")
_PIECE = 1 << 20  # bytes that are hashed at once


@dataclass(frozen=True)  # without slots, for what is cached
class AdapterFiles:
    """A checked adapter folder.

    name    after the model's name and a colon in the API
    scale   factor of the low-rank product
    base    the model it was trained from, per its configuration; empty if not named
    layers  rank of each adapted layer, by the layer's path in the model
    """

    name: str
    path: Path
    scale: float
    base: str
    layers: Mapping[str, int]

    @property
    def weights(self) -> Path:
        return self.path / WEIGHTS

    @property
    def size(self) -> int:
        """Bytes of its weights."""
        return self.weights.stat().st_size

    @property
    def rank(self) -> int:
        """The highest rank of its layers."""
        return max(self.layers.values())

    @cached_property
    def digest(self) -> str:
        """32 hex digits over weights and scale; part of the key that its pages are cached under.

        Reads the whole file. Raises OSError.
        """
        digest = blake2b(repr(self.scale).encode(), digest_size=16)
        with open_regular(self.weights) as content:
            while piece := content.read(_PIECE):
                digest.update(piece)
        return digest.hexdigest()


def find_adapters(places: Mapping[str, str]) -> tuple[AdapterFiles, ...]:
    """Return the adapters in these folders, sorted by name.

    Raises ModelNotFound, UnsupportedModel.
    """
    return tuple(find_adapter(name, folder) for name, folder in places.items())


def is_adapter(folder: Path) -> bool:
    """True if the folder looks like an adapter, whichever program wrote it."""
    return (folder / CONFIG).is_file()


def find_adapter(name: str, folder: str | os.PathLike[str]) -> AdapterFiles:
    """Raises ModelNotFound, or UnsupportedModel for a folder that is not served."""
    path = Path(folder).expanduser().resolve()
    if not is_adapter(path):
        raise ModelNotFound(
            f"The adapter {name}: {folder} has no {CONFIG}. Name the folder that `mlx_lm.lora` has "
            "written (its --adapter-path)."
        )
    try:
        config = read_json(path / CONFIG, MAX_TEXT)
    except (OSError, ValueError) as error:
        raise UnsupportedModel(f"The adapter {name}: {CONFIG} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise UnsupportedModel(f"The adapter {name}: {CONFIG} is not a JSON object.")
    _refuse_other_kinds(name, path, config)
    base = config.get("model")
    return AdapterFiles(
        name,
        path,
        _scale(name, config),
        base if isinstance(base, str) else "",
        _layers(name, path / WEIGHTS),
    )


def _refuse_other_kinds(name: str, path: Path, config: Mapping[str, Any]) -> None:
    """Raises UnsupportedModel."""
    if "peft_type" in config or any((path / file).exists() for file in _PEFT_WEIGHTS):
        raise UnsupportedModel(
            f"The adapter {name} is in PEFT's format. Adapters are served as `mlx_lm.lora` writes them: "
            "train it with that, or merge it into its model with PEFT and serve that model."
        )
    kind = config.get("fine_tune_type", "lora")
    if kind == "full":
        raise UnsupportedModel(
            f"The adapter {name} is a full fine-tune (fine_tune_type: full), which replaces whole weights. "
            "`mlx_lm.fuse` makes a model of it, which is served as any other."
        )
    if kind == "dora":
        raise UnsupportedModel(
            f"The adapter {name} is a DoRA (fine_tune_type: dora), which is not served beside its model. "
            "`mlx_lm.fuse` makes a model of it, or train it with `mlx_lm.lora --fine-tune-type lora`."
        )
    if kind != "lora":
        raise UnsupportedModel(
            f"The adapter {name} has the unknown fine_tune_type {str(kind)[:40]!r}; lora is served."
        )
    if not (path / WEIGHTS).is_file():
        raise UnsupportedModel(
            f"The adapter {name}: {path} has no {WEIGHTS}. `mlx_lm.lora --train` writes it beside "
            f"{CONFIG}; one of its checkpoints can be copied to that name."
        )


def _scale(name: str, config: Mapping[str, Any]) -> float:
    """Raises UnsupportedModel."""
    parameters = config.get("lora_parameters")
    scale = parameters.get("scale") if isinstance(parameters, dict) else None
    if isinstance(scale, int | float) and not isinstance(scale, bool) and math.isfinite(scale):
        return float(scale)
    raise UnsupportedModel(
        f"The adapter {name}: {CONFIG} has no number lora_parameters.scale, as `mlx_lm.lora` writes it."
    )


def _layers(name: str, file: Path) -> dict[str, int]:
    """The rank of each layer. Raises UnsupportedModel."""
    shapes = read_shapes(file, f"The adapter {name}")
    ranks: dict[str, int] = {}
    for tensor, shape in shapes.items():
        layer, _, side = tensor.rpartition(".")
        if not layer or side not in _SIDES or len(shape) not in (2, 3) or 0 in shape:
            raise UnsupportedModel(
                f"The adapter {name}: {tensor[:100]!r} in {file.name} is not a matrix of LoRA, which are "
                "called lora_a and lora_b."
            )
        ranks[layer] = _rank(shape, side)
    for layer in ranks:
        a, b = (shapes.get(f"{layer}.{side}") for side in _SIDES)
        if a is None or b is None or _rank(a, "lora_a") != _rank(b, "lora_b"):
            raise UnsupportedModel(
                f"The adapter {name}: lora_a and lora_b of {layer[:100]} do not belong together."
            )
    if not ranks:
        raise UnsupportedModel(f"The adapter {name}: {file.name} is empty.")
    return ranks


def _rank(shape: Sequence[int], side: str) -> int:
    """Rank of a matrix; expert matrices (3 dimensions) are stored transposed."""
    is_last = (side == "lora_a") == (len(shape) == 2)
    return shape[-1] if is_last else shape[-2]

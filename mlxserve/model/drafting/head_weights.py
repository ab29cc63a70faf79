"""Finds the weights of a head in a folder, and loads them into a HeadModel.

mlx-lm's definitions drop these weights, so they are read from the files beside the model's own, or from a folder of a
head alone. Experts are stacked, latent projections split and FP8 is converted by the family's own definition: the
head's layer is given to it under the name of a model's first layer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map_with_path

from mlxserve.hub.files import ModelFiles, text_config
from mlxserve.hub.head_families import (
    FINAL_NORM,
    Config,
    HeadFamily,
    family_of,
    head_tensors,
    is_head,
    place_of,
)
from mlxserve.hub.headers import read_shapes
from mlxserve.model.drafting.head_model import HeadModel
from mlxserve.model.load import READ_ERRORS, LoadedModel, in_float32, refuse_too_large

# Of heads in half precision: 10.4 -> 2.7 ms a call, and as many guesses right (mlxcel #1203).
_GROUP_SIZE, _BITS = 64, 4
# Weights of experts, as published or as mlx-lm and mlx-vlm write them.
_EXPERTS = re.compile(r"\b(experts|switch_mlp|moe)\.")
Weights = dict[str, mx.array]


class HeadRefused(Exception):
    """A head that cannot draft; the text is a sentence that says why."""


@dataclass(frozen=True, slots=True)
class HeadFiles:
    """The weights of a head in a folder.

    family   of the model that it drafts for
    tensors  maps their names in the files to those after the prefix
    """

    files: ModelFiles
    family: HeadFamily
    tensors: Mapping[str, str]

    @property
    def name(self) -> str:
        return self.files.name


def find_head(files: ModelFiles, config: Config) -> HeadFiles | None:
    """Return the head in a folder for a model with this config; None if it has none.

    Reads headers alone. Raises UnsupportedModel for a damaged file.
    """
    family = family_of(config)
    if family is None or files.gguf is not None:
        return None
    names = {name for file in files.weights for name in read_shapes(file, files.name)}
    tensors = head_tensors(names, files.config, family)
    return HeadFiles(files, family, tensors) if is_head(tensors) else None


def load_head(
    head: HeadFiles,
    target: LoadedModel,
    *,
    is_metal: bool,
    memory_limit: int,
    is_minus_one: bool | None = None,
) -> tuple[HeadModel, bool]:
    """Return (a head on Metal in 4 bits, on a CPU in float32; whether its norms were taken as stored minus one).

    memory_limit: bytes
    is_minus_one: whether they are; None to tell from the files
    Raises HeadRefused for weights that do not fit together, and OutOfMemory.
    """
    kind = target.config.get("model_type")
    try:
        weights, is_published = _read(head)
        if is_minus_one is None:
            is_minus_one = head.family.is_minus_one and is_published
        has_experts = any(_EXPERTS.search(name) for name in weights)
        model = HeadModel(one_layer(target.config, head, has_experts), head.family, target)
        weights = _placed(model, head.family, weights, is_minus_one=is_minus_one)
        _quantise_as_stored(model, weights, head.files.config)
        model.load_weights(list(weights.items()))
        if is_metal:
            _cast(model, target.dtype)
            _quantise(model)
    except (*READ_ERRORS, StopIteration) as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise HeadRefused(
            f"{head.name}: its head does not fit a {kind} model: {reason:.300}"
        ) from error
    if is_metal:
        refuse_too_large(sum(array.nbytes for array in _arrays(model)), head.name, memory_limit)
    else:
        in_float32(model, head.name, memory_limit)
    mx.eval(model.parameters())
    return model, is_minus_one


def one_layer(config: Config, head: HeadFiles, has_experts: bool) -> dict[str, Any]:
    """Return the config of a model of the family whose only layer is the head's."""
    text = text_config(config)
    changes: dict[str, Any] = {
        "num_hidden_layers": 1,
        "tie_word_embeddings": False,
        **head.family.changes(text, has_experts),
    }
    inner = config.get("text_config")
    if isinstance(inner, Mapping):
        return {**config, **changes, "text_config": {**inner, **changes}}
    return {**config, **changes}


def _read(head: HeadFiles) -> tuple[Weights, bool]:
    """Return (arrays that are not read yet, by their names after the prefix; whether mlx has not written them)."""
    weights: Weights = {}
    is_published = False
    for file in head.files.weights:
        arrays, is_mlx = _load(file)
        own = {head.tensors[name]: array for name, array in arrays.items() if name in head.tensors}
        weights |= own
        is_published = is_published or bool(own and not is_mlx)
    return weights, is_published


def _load(file: Path) -> tuple[Weights, bool]:
    loaded: Any = mx.load(str(file), return_metadata=True)
    arrays, metadata = loaded
    return arrays, metadata.get("format") == "mlx"


def _placed(
    model: HeadModel, family: HeadFamily, weights: Weights, *, is_minus_one: bool
) -> Weights:
    """Return the arrays by their paths in the model."""
    parts: Weights = {}
    layer: Weights = {}
    for name, array in weights.items():
        if (place := place_of(name)) is None:
            continue
        role, rest = place
        if role is None:
            layer[f"{family.inner}.{rest}"] = array
        elif role == FINAL_NORM:
            parts[f"{family.inner}.{family.norm}.norm.{rest}"] = array
        else:
            parts[f"{family.inner}.{family.embedding}.{role}.{rest}"] = array
    # A definition may add one to norms where it finds tensors that a head lacks: it is done here for all.
    parts |= {**model.whole.sanitize(dict(layer)), **_norms(layer)}
    if is_minus_one:
        parts |= {name: array + 1.0 for name, array in _norms(parts).items()}
    return {f"whole.{name}": array for name, array in parts.items()}


def _norms(weights: Weights) -> Weights:
    return {
        name: array
        for name, array in weights.items()
        if name.endswith("norm.weight") and array.ndim == 1
    }


def _quantise_as_stored(model: nn.Module, weights: Weights, config: Config) -> None:
    """Quantise the modules whose weights come quantised, as the shapes of these say."""
    written = config.get("quantization")
    mode = written.get("mode", "affine") if isinstance(written, Mapping) else "affine"

    def how(path: str, module: nn.Module) -> bool | dict[str, Any]:
        scales = weights.get(f"{path}.scales")
        if scales is None or not hasattr(module, "to_quantized"):
            return False
        size = module.weight.shape[-1]
        bits = weights[f"{path}.weight"].shape[-1] * 32 // size
        return {"group_size": size // scales.shape[-1], "bits": bits, "mode": mode}

    nn.quantize(model, class_predicate=how)


def _cast(model: HeadModel, dtype: mx.Dtype) -> None:
    """Convert the weights to the dtype of the hidden states: two half precisions together are computed in float32."""
    may_cast = getattr(model.whole, "cast_predicate", lambda _: True)

    def cast(path: str, array: mx.array) -> mx.array:
        is_cast = mx.issubdtype(array.dtype, mx.floating) and may_cast(path)
        return array.astype(dtype) if is_cast else array

    model.update(tree_map_with_path(cast, model.parameters()))


def _quantise(model: HeadModel) -> None:
    """Quantise what is in half precision, but for what the family's definition leaves as it is."""
    of_family = getattr(model.whole, "quant_predicate", None)

    def how(path: str, module: nn.Module) -> bool | dict[str, Any]:
        if not hasattr(module, "to_quantized") or module.weight.shape[-1] % _GROUP_SIZE:
            return False
        return True if of_family is None else of_family(path, module)

    nn.quantize(model, _GROUP_SIZE, _BITS, class_predicate=how)


def _arrays(model: nn.Module) -> list[mx.array]:
    return [array for _, array in tree_flatten(model.parameters())]

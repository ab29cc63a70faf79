"""Writes a small random model of any architecture that is read, as llama.cpp's converter writes it.

`small_files.json` has the metadata of each, the tensors that tell the configuration, and tensors that are not
parameters. The product's row makes the model and names its tensors, `inverse.py` puts them in llama.cpp's order;
what they mean is judged by llama.cpp, which loads the same file (`judge.py`).
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any
from zlib import crc32

import mlx.nn as nn
import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize, quantize

from mlxserve.hub.gguf.actions import Interleave, TensorPart, size
from mlxserve.hub.gguf.config import model_config
from mlxserve.hub.gguf.reader import Header, read_header
from mlxserve.hub.gguf.slots import Slot, slots_of
from tests.hub.gguf.files import Array, byte_level_vocabulary, write_gguf
from tests.hub.gguf.inverse import undone

VOCAB = 288
_HUGE = 1e20  # divides a frequency that is not rotated
PROMPT = [5, 90, 17, 200, 31, 8, 8, 140, 77, 61, 5, 90, 33, 210, 4, 19]
SMALL: Mapping[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_text())
COMMON: Mapping[str, Any] = SMALL["common"]
FILES: Mapping[str, Mapping[str, Any]] = SMALL["files"]

_SIZES = {  # of tensors that are joined as they are
    2: ("shared_intermediate_size", "shared_intermediate_size"),
    3: (
        "num_attention_heads*head_dim",
        "num_key_value_heads*head_dim",
        "num_key_value_heads*head_dim",
    ),
}


def metadata_of(case: str) -> dict[str, Any]:
    one = FILES[case]
    metadata = {**COMMON, **one.get("metadata", {}), **byte_level_vocabulary()}
    return {key: value for key, value in metadata.items() if value is not None}


def write_small(
    case: str, file: Path, kind: str | None = None, *, is_rounded: bool = False
) -> Path:
    """case: an architecture, and a variant of it after a slash
    kind: of blocks, for tensors whose rows are whole blocks
    is_rounded: the values of these blocks, in float32
    """
    architecture = case.partition("/")[0]
    metadata, one = metadata_of(case), FILES[case]
    extra = {name: np.array(values, np.float32) for name, values in one.get("extra", {}).items()}
    shown = {name: np.zeros(32, np.float32) for name in one.get("present", ())}
    embedding = {"token_embd.weight": np.zeros((VOCAB, metadata["embedding_length"]), np.float32)}
    write_gguf(file, architecture, metadata, {**embedding, **shown, **extra})
    header = read_header(file)
    config = model_config(header)
    tensors = _tensors(_model(config), header, config, one)
    if kind is None:
        return write_gguf(file, architecture, metadata, {**tensors, **extra})
    blocks = GGMLQuantizationType[kind]
    size_of_block, _ = GGML_QUANT_SIZES[blocks]
    packed = {
        name: quantize(array, blocks)
        for name, array in tensors.items()
        if name.endswith(".weight") and array.ndim > 1 and array.shape[-1] % size_of_block == 0
    }
    if is_rounded:
        values = {name: dequantize(raw, blocks) for name, raw in packed.items()}
        return write_gguf(file, architecture, metadata, {**tensors, **extra, **values})
    kinds = dict.fromkeys(packed, kind)
    return write_gguf(file, architecture, metadata, {**tensors, **extra, **packed}, kinds)


def _model(config: Mapping[str, Any]) -> nn.Module:
    from mlx_lm.utils import _get_classes

    model_class, args_class = _get_classes(config=dict(config))
    model: nn.Module = model_class(args_class.from_dict(dict(config)))
    return model


def _tensors(
    model: nn.Module, header: Header, config: Mapping[str, Any], one: Mapping[str, Any]
) -> dict[str, Array]:
    tensors: dict[str, Array] = {}
    parts: dict[str, dict[int, Array]] = defaultdict(dict)
    axes: dict[str, int] = {}
    for slot in slots_of(model, header):
        if slot.path.startswith("lm_head.") and config["tie_word_embeddings"]:
            continue
        array = undone(_random(slot, one.get("outer", 2.0)), slot.actions, config)
        [part] = [each for each in slot.actions if isinstance(each, TensorPart)] or [None]
        if part is not None:
            if array.shape[part.axis] != size(part.sizes[part.number], config):
                array = array[None]
            parts[slot.names[0]][part.number], axes[slot.names[0]] = array, part.axis
            continue
        tensors |= dict(zip(slot.names, _pieces(array, slot, config), strict=True))
    for name, by_number in parts.items():
        tensors[name] = np.concatenate([by_number[n] for n in sorted(by_number)], axis=axes[name])
    shapes: Mapping[str, Any] = one.get("shapes", {})
    for name, array in tensors.items():
        for end, shape in shapes.items():
            if name.endswith(end):
                tensors[name] = array.reshape(shape)
                break
        else:
            tensors[name] = array.squeeze() if "conv" in name or "shexp" in name else array
    return tensors


def _pieces(array: Array, slot: Slot, config: Mapping[str, Any]) -> list[Array]:
    """Split a parameter among its tensors: the last ones have a part each, the first one all others."""
    if len(slot.names) == 1:
        return [array]
    [joined] = [each for each in slot.actions if isinstance(each, Interleave)] or [None]
    sizes = [size(each, config) for each in (joined.sizes if joined else _SIZES[len(slot.names)])]
    starts = list(accumulate(sizes))[:-1][-(len(slot.names) - 1) :]
    return np.split(array, starts)


def _random(slot: Slot, outer: float) -> Array:
    """Values of a size with which probabilities are neither equal nor all of one token.

    outer: of embeddings and the head
    """
    draw = np.random.default_rng(crc32(slot.path.encode()))
    if len(slot.shape) < 2 or "conv" in slot.path:
        is_norm = slot.path.endswith("weight") and ("norm" in slot.path or ".ln_" in slot.path)
        centre = float(is_norm or "scal" in slot.path)
        return draw.normal(centre, 0.2, slot.shape).astype(np.float32)
    is_outer = "embed" in slot.path or "wte" in slot.path or "lm_head" in slot.path
    spread = (outer if is_outer else 1.2) / slot.shape[-1] ** 0.5
    return draw.normal(0, spread, slot.shape).astype(np.float32)


def fingerprint(file: Path) -> tuple[int, float]:
    """What llama.cpp read: (names and shapes of all tensors, a sum of values that depends on their places).

    A row and its inverse would agree with each other if an action or a name were missing in both.
    """
    tensors = sorted(read_header(file).tensors.values(), key=lambda each: each.name)
    names = crc32(repr([(each.name, each.shape) for each in tensors]).encode())
    total = 0.0
    for tensor in tensors:
        values = np.fromfile(file, "<f4", tensor.nbytes // 4, offset=tensor.offset)
        values = np.where(np.abs(values) < _HUGE, values, 0)
        total += float(values.astype(np.float64) @ np.cos(0.7 * np.arange(len(values))))
    return names, round(total, 2)

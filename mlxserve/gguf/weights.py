"""Loads a GGUF file's tensors as an mlx-lm model: named, repacked and put in mlx-lm's order.

One tensor is in memory twice at a time: it is read and repacked in pieces of a few megabytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from mlxserve.errors import UnsupportedModel
from mlxserve.gguf.blocks import GROUP_SIZE, REPACKINGS
from mlxserve.gguf.config import architecture, family
from mlxserve.gguf.reader import Header, TensorInfo, block_size

_PIECE = 1 << 22  # bytes read and repacked at a time
_PLAIN = {"F32": mx.float32, "F16": mx.float16, "BF16": mx.bfloat16}
_UNUSED = frozenset({"rope_freqs.weight"})
_SHOWN = 3  # names in a message


def load_gguf(header: Header, config: Mapping[str, Any], dtype: mx.Dtype) -> nn.Module:
    """mlx-lm's model with all of the file's weights.

    dtype: of scales, biases and of what is not quantised. Scales are exact in float32.
    Raises UnsupportedModel, and what mlx-lm raises for a configuration that it cannot build.
    """
    from mlx_lm.utils import _get_classes

    model_class, args_class = _get_classes(config=dict(config))
    model: nn.Module = model_class(args_class.from_dict(dict(config)))
    modules = dict(model.named_modules())
    rotated = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}
    quantised: dict[str, dict[str, int]] = {}
    weights: list[tuple[str, mx.array]] = []
    for path, tensor in _named(model, header):
        module, _, leaf = path.rpartition(".")
        arrays = _read(tensor, dtype, leaf, packs=hasattr(modules[module], "to_quantized"))
        if "scales" in arrays:
            bits = arrays[leaf].shape[-1] * 32 // tensor.shape[-1]
            quantised[module] = {"group_size": GROUP_SIZE, "bits": bits}
        heads = rotated.get(tensor.name.split(".")[-2])
        if heads is not None and family(header).swaps_pairs:
            arrays = {name: _swap_pairs(array, config[heads]) for name, array in arrays.items()}
        mx.eval(list(arrays.values()))
        weights += [(f"{module}.{name}", array) for name, array in arrays.items()]
    nn.quantize(model, class_predicate=lambda path, _: quantised.get(path, False))
    model.load_weights(weights)
    return model


def _named(model: nn.Module, header: Header) -> Iterator[tuple[str, TensorInfo]]:
    """Each parameter of the model and its tensor, in the file's order. Raises UnsupportedModel."""
    from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, get_tensor_name_map

    [kind] = [one for one in MODEL_ARCH if MODEL_ARCH_NAMES[one] == architecture(header)]
    names = get_tensor_name_map(kind, len(model.layers))
    paths: dict[str, str] = {}
    missing = []
    for path, _ in tree_flatten(model.parameters()):
        module, _, leaf = path.rpartition(".")
        name = f"{names.get_name(module)}.{leaf}"
        if name in header.tensors:
            paths[name] = path
        else:
            missing.append(path)
    if missing:
        raise UnsupportedModel(
            f"The GGUF file lacks {len(missing)} of the model's tensors: "
            f"{', '.join(missing[:_SHOWN])}. If the model is split into several files, all of them "
            "must be in one folder; if not, take another conversion of it."
        )
    if unknown := sorted(header.tensors.keys() - paths.keys() - _UNUSED):
        raise UnsupportedModel(
            f"The GGUF file has {len(unknown)} tensors that mlx-lm's definition of the model has no "
            f"place for: {', '.join(unknown[:_SHOWN])}. Take the model's MLX conversion."
        )
    for name, tensor in header.tensors.items():
        if name in paths:
            yield paths[name], tensor


def _read(tensor: TensorInfo, dtype: mx.Dtype, leaf: str, *, packs: bool) -> dict[str, mx.array]:
    """The tensor's arrays by the names that they have in an mlx module."""
    if tensor.kind in _PLAIN:
        raw = np.fromfile(tensor.file, np.uint8, tensor.nbytes, offset=tensor.offset)
        array = mx.array(raw).view(_PLAIN[tensor.kind]).reshape(tensor.shape)
        return {leaf: array.astype(dtype)}
    if tensor.kind not in REPACKINGS:
        raise UnsupportedModel(
            f"{tensor.name} is quantised as {tensor.kind}, which cannot be converted to mlx's "
            f"formats. Take a file of another quantisation, such as Q4_K_M or Q8_0."
        )
    packed = _repack(tensor)
    weight, scales, biases = (mx.array(one) for one in packed)
    weight = weight.view(mx.uint32)
    if packs:
        return {leaf: weight, "scales": scales.astype(dtype), "biases": biases.astype(dtype)}
    bits = REPACKINGS[tensor.kind].bits
    array = mx.dequantize(weight, scales, biases, group_size=GROUP_SIZE, bits=bits)
    return {leaf: array.astype(dtype)}


def _repack(tensor: TensorInfo) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes, scales and biases of all rows, in their shapes."""
    how = REPACKINGS[tensor.kind]
    num_values, num_bytes = block_size(tensor.kind)
    num_blocks = tensor.nbytes // num_bytes
    groups = num_values // GROUP_SIZE
    codes = np.empty((num_blocks, num_values * how.bits // 8), np.uint8)
    scales, biases = (np.empty((num_blocks, groups), np.float32) for _ in range(2))
    step = max(1, _PIECE // num_bytes)
    with tensor.file.open("rb") as file:
        file.seek(tensor.offset)
        for start in range(0, num_blocks, step):
            count = min(step, num_blocks - start)
            raw = np.fromfile(file, np.uint8, count * num_bytes).reshape(count, num_bytes)
            piece = slice(start, start + count)
            codes[piece], scales[piece], biases[piece] = how.repack(raw)
    rows = tensor.shape[:-1]
    return codes.reshape(*rows, -1), scales.reshape(*rows, -1), biases.reshape(*rows, -1)


def _swap_pairs(array: mx.array, num_heads: int) -> mx.array:
    """Rows (pair, half) of each head as (half, pair): mlx-lm rotates halves, llama.cpp neighbours."""
    halves = array.reshape(num_heads, array.shape[0] // num_heads // 2, 2, -1)
    return halves.swapaxes(1, 2).reshape(array.shape)

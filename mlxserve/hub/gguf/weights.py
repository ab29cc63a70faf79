"""Loads a GGUF file's tensors as an mlx-lm model: named, repacked and put in mlx-lm's order.

Tensors are read and repacked in pieces, by several threads, straight into mlx's memory, so that little more
is used at any time than what is kept. The threads begin with the next tensor while one is put in order.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from metal_kernels.reading import view
from mlxserve.core.errors import UnsupportedModel
from mlxserve.hub.gguf.blocks import GROUP_SIZE, REPACKINGS
from mlxserve.hub.gguf.config import family
from mlxserve.hub.gguf.lanes import Bytes
from mlxserve.hub.gguf.latents import computed, other_form
from mlxserve.hub.gguf.memory import unwritten
from mlxserve.hub.gguf.reader import Header, TensorInfo, block_size
from mlxserve.hub.gguf.scales import write_scales
from mlxserve.hub.gguf.slots import Slot, is_dropped, slots_of

# Values repacked at a time: less costs calls, each of which may wait for the interpreter, more costs caches. Not a
# power of two, with which all rows of lanes would begin in the same places of a cache.
_PIECE = 1_000_000
_LARGE_PIECE = 1 << 22  # bytes that are only read
_KEPT_BY_MALLOC = 1 << 24  # bytes, more than a piece's arrays have together
_PLAIN = {"F32": mx.float32, "F16": mx.float16, "BF16": mx.bfloat16}
_IN_THE_CONFIGURATION = frozenset(
    {"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"}
)
_SHOWN = 3  # names in a message
Arrays = dict[str, mx.array]


def load_gguf(header: Header, config: Mapping[str, Any], *, is_metal: bool) -> nn.Module:
    """Load mlx-lm's model with all of the file's weights.

    Scales, biases and what is not quantised are float32 without Metal, which is exact; on Metal
    they have 16 bits.

    Raises UnsupportedModel, and what mlx-lm raises for a configuration that it cannot build.
    """
    from mlx_lm.utils import _get_classes

    rules = family(header)
    half = mx.bfloat16 if rules.is_bfloat16 else mx.float16
    dtype = half if is_metal else mx.float32
    model_class, args_class = _get_classes(config=dict(config))
    model: nn.Module = model_class(args_class.from_dict(dict(config)))
    quantised: dict[str, dict[str, Any]] = {}
    weights: Arrays = {}
    scale_dtype = mx.float16 if dtype == mx.float16 else mx.float32
    for slot, tensors, packings in _begun(_matched(model, header, config), scale_dtype):
        module, _, leaf = slot.path.rpartition(".")
        if packings:
            arrays = _joined([packing.result() for packing in packings], slot, config)
            how = REPACKINGS[tensors[0].kind]
            quantised[module] = {"group_size": GROUP_SIZE, "bits": how.bits, "mode": how.mode}
        else:
            arrays = {leaf: _plain(tensors, slot, config)}
        arrays = {
            f"{module}.{name}" if module else name: _converted(array, dtype)
            for name, array in arrays.items()
        }
        mx.eval(*arrays.values())
        weights |= arrays
    mx.eval(list(weights.values()))
    if hasattr(model, "sanitize"):
        weights = model.sanitize(weights)
    nn.quantize(model, class_predicate=lambda path, _: quantised.get(path, False))
    model.load_weights(list(weights.items()))
    return model


def _converted(array: mx.array, dtype: mx.Dtype) -> mx.array:
    """Cast to `dtype`, packed codes excepted.

    mlx casts: numpy takes twice as long, and has no bfloat16.
    """
    return array.astype(dtype) if mx.issubdtype(array.dtype, mx.floating) else array


def _matched(
    model: nn.Module, header: Header, config: Mapping[str, Any]
) -> Iterator[tuple[Slot, list[TensorInfo]]]:
    """Pair each parameter with the tensors that it is made of, in the file's order.

    Raises UnsupportedModel.
    """
    tensors = header.tensors
    slots, missing = [], []
    for slot in slots_of(model, header):
        if all(name in tensors for name in slot.names):
            slots.append(slot)
        elif others := other_form(slot.names[0], tensors):
            slots.append(replace(slot, names=others, wanted=slot.names[0], can_pack=False))
        elif not (slot.path.startswith("lm_head.") and config["tie_word_embeddings"]):
            missing.append(slot.path)
    if missing:
        raise UnsupportedModel(
            f"The GGUF file lacks {len(missing)} of the model's tensors: "
            f"{', '.join(missing[:_SHOWN])}. If the model is split into several files, all of them "
            "must be in one folder; if not, take another conversion of it."
        )
    used = {name for slot in slots for name in slot.names}
    unknown = sorted(
        name
        for name in tensors.keys() - used - _IN_THE_CONFIGURATION
        if not is_dropped(name, family(header), config)
    )
    if unknown:
        raise UnsupportedModel(
            f"The GGUF file has {len(unknown)} tensors that mlx-lm's definition of the model has no "
            f"place for: {', '.join(unknown[:_SHOWN])}. Take the model's MLX conversion."
        )
    order = {name: number for number, name in enumerate(tensors)}
    for slot in sorted(slots, key=lambda slot: order[slot.names[0]]):
        yield slot, [tensors[name] for name in slot.names]


@dataclass(frozen=True, slots=True)
class _Packing:
    """A tensor that threads are repacking; `arrays` by their names in an mlx module."""

    arrays: Arrays
    pieces: list[Future[None]]

    def result(self) -> Arrays:
        """Wait until all pieces are repacked and return the arrays. Raises OSError."""
        for piece in self.pieces:
            piece.result()
        return self.arrays


def _begun(
    matched: Iterable[tuple[Slot, list[TensorInfo]]], scale_dtype: mx.Dtype
) -> Iterator[tuple[Slot, list[TensorInfo], list[_Packing]]]:
    """Start the repacking of each parameter one ahead of the one that is yielded."""
    before = None
    for slot, tensors in matched:
        forms = {
            REPACKINGS[each.kind].form if each.kind in REPACKINGS else None for each in tensors
        }
        is_packed = slot.can_pack and len(forms) == 1 and None not in forms
        packings = [_begin(tensor, scale_dtype) for tensor in tensors] if is_packed else []
        if before is not None:
            yield before
        before = slot, tensors, packings
    if before is not None:
        yield before


def _joined(parts: list[Arrays], slot: Slot, config: Mapping[str, Any]) -> Arrays:
    """Join quantised tensors by their rows and put them in the definition's order."""
    arrays = parts[0]
    if len(parts) > 1:
        arrays = {name: mx.concatenate([part[name] for part in parts]) for name in arrays}
    for action in slot.actions:
        arrays = {name: action.apply(array, config) for name, array in arrays.items()}
    # Axes of one, which llama.cpp leaves out or adds.
    return {
        name: array.reshape(*slot.shape[:-1], array.shape[-1]) for name, array in arrays.items()
    }


def _plain(tensors: list[TensorInfo], slot: Slot, config: Mapping[str, Any]) -> mx.array:
    """Return a parameter's values. Raises UnsupportedModel."""
    arrays = [dense(tensor) for tensor in tensors]
    if slot.wanted is not None:
        return computed(slot.wanted, arrays, config)
    array = arrays[0]
    if len(arrays) > 1:
        array = mx.concatenate([each.astype(mx.float32) for each in arrays])
    for action in slot.actions:
        array = action.apply(array, config)
    # Axes of one, which llama.cpp leaves out.
    return array.reshape(slot.shape) if array.size == prod(slot.shape) else array


def dense(tensor: TensorInfo) -> mx.array:
    """Return a tensor dequantised. Raises UnsupportedModel for a kind that cannot be converted."""
    if tensor.kind in _PLAIN:
        return _raw(tensor).view(_PLAIN[tensor.kind]).reshape(tensor.shape)
    if tensor.kind not in REPACKINGS:
        raise UnsupportedModel(
            f"{tensor.name} is quantised as {tensor.kind}, which cannot be converted to mlx's "
            "formats. Take a file of another quantisation, such as Q4_K_M or Q8_0."
        )
    how = REPACKINGS[tensor.kind]
    arrays = _begin(tensor, mx.float32).result()
    return mx.dequantize(
        arrays["weight"],
        arrays["scales"],
        arrays.get("biases"),
        group_size=GROUP_SIZE,
        bits=how.bits,
        mode=how.mode,
    )


def _raw(tensor: TensorInfo) -> mx.array:
    """Return the tensor's bytes."""
    array = unwritten((tensor.nbytes,), mx.uint8)
    memory = view(array)

    def read(start: int) -> None:
        _read_into(tensor, start, memory[start : start + _LARGE_PIECE])

    for piece in _submitted(read, range(0, tensor.nbytes, _LARGE_PIECE)):
        piece.result()
    return array


def _begin(tensor: TensorInfo, scale_dtype: mx.Dtype) -> _Packing:
    """Start repacking all rows of a tensor."""
    how = REPACKINGS[tensor.kind]
    num_values, num_bytes = block_size(tensor.kind)
    num_blocks = tensor.nbytes // num_bytes
    *rows, width = tensor.shape
    is_affine = how.mode == "affine"
    kinds = [scale_dtype, scale_dtype] if is_affine else [mx.uint8]
    memory = (
        unwritten((*rows, width * how.bits // 32), mx.uint32),
        *(unwritten((*rows, width // GROUP_SIZE), kind) for kind in kinds),
    )
    # numpy writes into mlx's memory.
    codes, *columns = (view(part).reshape(num_blocks, -1) for part in memory)
    codes = codes.view(np.uint8)
    step = _PIECE // num_values

    def repack(start: int) -> None:
        piece = slice(start, min(start + step, num_blocks))
        raw = np.empty((piece.stop - start, num_bytes), np.uint8)
        _read_into(tensor, start * num_bytes, raw.reshape(-1))
        repacked = how.repack(raw, codes[piece])
        write_scales(repacked, how.zero, *(column[piece] for column in columns))

    names = dict(zip(("weight", "scales", "biases"), memory, strict=False))
    return _Packing(names, _submitted(repack, range(0, num_blocks, step)))


def _read_into(tensor: TensorInfo, start: int, memory: Bytes) -> None:
    """Read into `memory` from byte `start` of the tensor. Raises OSError."""
    with open(tensor.file, "rb", buffering=0) as file:
        file.seek(tensor.offset + start)
        if file.readinto(memory.data) != memory.nbytes:
            raise OSError(f"{tensor.file.name} has become shorter while it was read")


def _submitted(work: Callable[[int], None], starts: Iterable[int]) -> list[Future[None]]:
    """Run `work` on several threads; numpy and file reads release the GIL."""
    return [_threads().submit(work, start) for start in starts]


@cache
def _threads() -> ThreadPoolExecutor:
    # glibc gives memory back to the system when it is freed, but for what is smaller than the largest block
    # that was ever mapped and freed. Without this a piece's arrays are mapped and cleared for each piece anew,
    # which takes two to four times as long as repacking.
    np.empty(_KEPT_BY_MALLOC, np.uint8)
    return ThreadPoolExecutor(min(8, os.cpu_count() or 1), "mlxserve-gguf")

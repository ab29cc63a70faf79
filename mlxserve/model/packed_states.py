"""Packing: one sequence's recurrent states as one array for each dtype, and as bytes.

A model has dozens of recurrent layers with two arrays each. Kept one by one they are a hundred small
allocations between those that steps make and free; a snapshot that is kept for long then leaves the
allocator's free memory in pieces. Packed they are one or two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import mlx.core as mx
import numpy as np

from metal_kernels.reading import read

Stack = list[list[mx.array]]  # [layer][array] (batch, ...)


@dataclass(frozen=True, slots=True)
class StateSpec:
    """One recurrent layer: (shape without the batch, dtype) of each of its arrays."""

    arrays: tuple[tuple[tuple[int, ...], mx.Dtype], ...]

    @property
    def nbytes(self) -> int:
        return sum(prod(shape) * dtype.size for shape, dtype in self.arrays)


class Packing:
    """Offsets of a model's state arrays in the packed ones."""

    def __init__(self, specs: Sequence[StateSpec]) -> None:
        self._specs = tuple(specs)
        self._dtypes = list(dict.fromkeys(dtype for spec in specs for _, dtype in spec.arrays))

    def pack(self, stack: Stack, row: int) -> list[mx.array]:
        """Copy a row of a stack: (elements,) for each dtype. Not evaluated."""
        parts: dict[mx.Dtype, list[mx.array]] = {dtype: [] for dtype in self._dtypes}
        for layer, spec in zip(stack, self._specs, strict=True):
            for array, (_, dtype) in zip(layer, spec.arrays, strict=True):
                parts[dtype].append(array[row].reshape(-1))
        # An array that is alone would stay a view of the whole stack.
        return [mx.contiguous(mx.concatenate(each)) for each in parts.values()]

    def unpack(self, packed: Sequence[mx.array]) -> Stack:
        """Return a stack of one row: views of the packed arrays."""
        begins = dict.fromkeys(self._dtypes, 0)
        arrays = dict(zip(self._dtypes, packed, strict=True))
        stack = []
        for spec in self._specs:
            layer = []
            for shape, dtype in spec.arrays:
                begin = begins[dtype]
                begins[dtype] = end = begin + prod(shape)
                layer.append(arrays[dtype][begin:end].reshape(1, *shape))
            stack.append(layer)
        return stack

    def to_bytes(self, packed: Sequence[mx.array]) -> bytes:
        """Return the states' arrays one after another, layer by layer. Waits for them."""
        arrays = [array for layer in self.unpack(packed) for array in layer]
        return b"".join(read(array.reshape(-1).view(mx.uint8)).tobytes() for array in arrays)

    def from_bytes(self, payload: bytes) -> list[mx.array]:
        """Inverse of `to_bytes`, for a model with the same states. Not evaluated."""
        begin, stack = 0, []
        for spec in self._specs:
            layer = []
            for shape, dtype in spec.arrays:
                end = begin + prod(shape) * dtype.size
                part = np.frombuffer(payload[begin:end], np.uint8)
                layer.append(mx.array(part).view(dtype).reshape(1, *shape))
                begin = end
            stack.append(layer)
        assert begin == len(payload), "a state of another model"
        return self.pack(stack, 0)

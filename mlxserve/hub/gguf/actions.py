"""What llama.cpp's converter did to a tensor, undone: each action gives a parameter as mlx-lm has it.

A row of an architecture (`family.py`) lists actions by the parts of a model. An action that only moves rows or whole
groups of columns (`moves_only`) is applied to codes, scales and biases of a quantised tensor as they are; all others
need values. Sizes are names of configuration, products and sums of them ("num_attention_heads*head_dim").
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

if TYPE_CHECKING:
    # Rows are read before a model is loaded, by commands that never load mlx.
    import mlx.core as mx

Config = Mapping[str, Any]


class Action(Protocol):
    """`moves_only`: no value changes, and groups of 32 columns stay together."""

    @property
    def moves_only(self) -> bool: ...

    def apply(self, array: mx.array, config: Config) -> mx.array: ...


def size(expression: str, config: Config) -> int:
    """Return the sum of products of numbers and of options of the configuration."""
    return sum(
        prod(int(part) if part.isdigit() else int(config[part]) for part in term.split("*"))
        for term in expression.split("+")
    )


def _starts(sizes: tuple[str, ...], config: Config) -> list[int]:
    """Return where each of the parts after the first begins."""
    return list(accumulate(size(each, config) for each in sizes[:-1]))


@dataclass(frozen=True, slots=True)
class SwapPairs:
    """Rows (pair, half) of each head become (half, pair).

    mlx-lm rotates halves, llama.cpp neighbours.

    width  rows of a head, if other rows follow the heads
    """

    heads: str
    width: str | None = None
    moves_only: ClassVar[bool] = True

    def apply(self, array: mx.array, config: Config) -> mx.array:
        """Reorder in place, which needs the memory of one head."""
        import mlx.core as mx

        from metal_kernels.reading import view

        mx.eval(array)
        heads = size(self.heads, config)
        rows = array.shape[0] if self.width is None else heads * size(self.width, config)
        nbytes = array.nbytes // array.shape[0]
        memory = view(array.view(mx.uint8)).reshape(array.shape[0], -1)[:rows]
        for head in memory.reshape(heads, -1, 2, nbytes):
            head[:] = head.swapaxes(0, 1).copy().reshape(head.shape)
        return array


@dataclass(frozen=True, slots=True)
class Plus:
    """A number is added: norms are stored with 1 more than some definitions have."""

    number: float
    moves_only: ClassVar[bool] = False

    def apply(self, array: mx.array, _: Config) -> mx.array:
        import mlx.core as mx

        return array.astype(mx.float32) + self.number


@dataclass(frozen=True, slots=True)
class NegativeLog:
    """-exp(A_log) becomes A_log, the decay of a recurrent layer."""

    moves_only: ClassVar[bool] = False

    def apply(self, array: mx.array, _: Config) -> mx.array:
        import mlx.core as mx

        return mx.log(-array.astype(mx.float32))


@dataclass(frozen=True, slots=True)
class TensorPart:
    """One of several parts that the file has one after the other in one tensor.

    axis  of them, from the end for experts: -2 are the rows of each
    """

    number: int
    sizes: tuple[str, ...]
    axis: int = 0
    moves_only: ClassVar[bool] = True

    def apply(self, array: mx.array, config: Config) -> mx.array:
        import mlx.core as mx

        return mx.split(array, _starts(self.sizes, config), axis=self.axis)[self.number]


@dataclass(frozen=True, slots=True)
class Interleave:
    """Parts one after the other become one group for each head, with a share of each part.

    The file has the rows q q q k k k v v v, a group of the definition q k v.
    """

    groups: str
    sizes: tuple[str, ...]
    moves_only: ClassVar[bool] = True

    def apply(self, array: mx.array, config: Config) -> mx.array:
        import mlx.core as mx

        rest = array.shape[1:]
        parts = mx.split(array, _starts(self.sizes, config), axis=0)
        grouped = [part.reshape(size(self.groups, config), -1, *rest) for part in parts]
        return mx.concatenate(grouped, axis=1).reshape(array.shape)


@dataclass(frozen=True, slots=True)
class GroupHeads:
    """Heads that are stored by their number within a group become one group after the other.

    Value heads of recurrent layers, of which several belong to one key head: llama.cpp repeats keys as tiles.

    first   how many rows before the heads stay as they are
    axis    0 for rows, -1 for columns
    """

    groups: str
    heads: str
    first: tuple[str, ...] = ()
    axis: int = 0
    moves_only: ClassVar[bool] = True

    def apply(self, array: mx.array, config: Config) -> mx.array:
        import mlx.core as mx

        groups, heads = size(self.groups, config), size(self.heads, config)
        if groups == heads:
            return array
        start = sum(size(each, config) for each in self.first)
        before, moved = mx.split(array, [start], axis=self.axis)
        axis = self.axis % array.ndim
        shape = moved.shape
        tiles = (*shape[:axis], heads // groups, groups, shape[axis] // heads, *shape[axis + 1 :])
        moved = moved.reshape(tiles).swapaxes(axis, axis + 1).reshape(shape)
        return mx.concatenate([before, moved], axis=self.axis)

"""Which part of an adapter's matrices a rank by heads has: the rows and columns that it has of each layer.

mlx-lm's `shard` says nowhere what it takes: some layers hold queries, keys and values beside each other, and heads of
keys may be repeated. So a second model of the same class, whose weights are the numbers of their own rows or columns,
is divided in the same way, and what is left of them is read. None of its other weights is ever computed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx.nn.layers.distributed import QuantizedShardedToAllLinear, ShardedToAllLinear
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from mlxserve.core.errors import UnsupportedModel
from mlxserve.model.rank_group import RankGroup
from mlxserve.model.split_by_heads import split_by_heads

Sizes = tuple[int, ...]

EMBEDDINGS = (nn.Embedding, nn.QuantizedEmbedding)
SWITCHES = (SwitchLinear, QuantizedSwitchLinear)
_LINEAR = (nn.Linear, nn.QuantizedLinear)
_SUMMED = (ShardedToAllLinear, QuantizedShardedToAllLinear)


class Share(NamedTuple):
    """One layer's part on this rank. None stands for all inputs, or all outputs."""

    inputs: mx.array | None = None
    outputs: mx.array | None = None

    def of(self, a: mx.array, b: mx.array) -> tuple[mx.array, mx.array]:
        """Return this rank's part of (..., input, rank) and (..., rank, output)."""
        a = a if self.inputs is None else mx.take(a, self.inputs, axis=-2)
        return a, b if self.outputs is None else mx.take(b, self.outputs, axis=-1)


class Shares(NamedTuple):
    """Sizes of layers in the undivided model, and shares of those that are divided, by their paths."""

    sizes: Mapping[str, Sizes | None]
    of: Mapping[str, Share]


def is_summed(layer: nn.Module) -> bool:
    """True if the layer sums its results over all ranks, of which each has some of its inputs."""
    return isinstance(layer, _SUMMED)


def sizes_of(layer: nn.Module | None) -> tuple[int, ...] | None:
    """Return (input, output) of a layer; None if it cannot be adapted.

    An embedding has (tokens, size), experts have (experts, input, output).
    """
    if isinstance(layer, SWITCHES):
        return layer.num_experts, layer.input_dims, layer.output_dims
    if not isinstance(layer, (*_LINEAR, *EMBEDDINGS)):
        return None
    rows, columns = layer.weight.shape
    if isinstance(layer, (nn.QuantizedLinear, nn.QuantizedEmbedding)):
        columns = columns * 32 // layer.bits
    return (rows, columns) if isinstance(layer, EMBEDDINGS) else (columns, rows)


def shares_of(model: nn.Module, group: RankGroup, name: str, paths: Iterable[str]) -> Shares:
    """Find the shares of layers at these paths. Raises UnsupportedModel."""
    whole = type(model)(model.args)
    modules = dict(whole.named_modules())
    sizes = {path: sizes_of(modules.get(path)) for path in paths}
    here = dict(model.named_modules())
    numbered: dict[str, bool] = {}  # True where inputs are divided
    for path, size in sizes.items():
        if size is None or isinstance(modules[path], nn.Embedding):  # every rank has all of it
            continue
        shape = _shape(here.get(path))
        if shape is None or shape == size[-2:]:
            continue
        is_input = shape[1] == size[-1]
        if not is_input and shape[0] != size[-2]:
            raise UnsupportedModel(
                f"{name}: {path[:100]} is divided among ranks in two directions, and cannot have adapters. Use "
                "pipeline_parallel_size, which splits by layers."
            )
        numbered[path] = is_input
        one = (1,) * (modules[path].weight.ndim - 2)
        # A weight is (..., output, input).
        numbers = mx.arange(size[-2 if is_input else -1])
        modules[path].weight = numbers.reshape(*one, *((1, -1) if is_input else (-1, 1)))
    split_by_heads(whole, group, name, str(getattr(model.args, "model_type", "")))
    left = dict(whole.named_modules())
    shares = {}
    for path, is_input in numbered.items():
        numbers = left[path].weight.flatten()
        shares[path] = Share(inputs=numbers) if is_input else Share(outputs=numbers)
    return Shares(sizes, shares)


def _shape(layer: nn.Module | None) -> Sizes | None:
    """Return (input, output) of a layer with a matrix on this rank; None for others."""
    if layer is None or "weight" not in layer:
        return None
    rows, columns = layer.weight.shape[-2:]
    if "scales" in layer:
        columns = columns * 32 // layer.bits
    return columns, rows

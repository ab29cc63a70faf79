"""A model's part by layers, without code for any architecture.

    rank N-1   embedding, first layers ──> ... ──> rank 0   last layers, head

Every layer keeps its place in the model's list, so that indices, masks and caches stay right: another
rank's layer is replaced by `RemoteLayer`, which returns what it is given, and the layers at the edges of
a part by `Stage`, which receives before its layer or sends after it. Tokens enter at the last rank
because the ring sends to neighbours only, and rank 0 samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache, CacheList, ChunkedKVCache, KVCache, RotatingKVCache

from mlxserve.core.errors import UnsupportedModel
from mlxserve.model.rank_group import RankGroup

_MARK = "_mlxserve_remote"
_PAIRS = (KVCache, RotatingKVCache, ChunkedKVCache)


class Passage:
    """The value passed from layer to layer, by its place among a layer's arguments.

    Usually it is the first, but a model may pass something else before it (talkie the embeddings).
    """

    def __init__(self) -> None:
        self._returned: mx.array | None = None

    def returned(self, x: mx.array) -> mx.array:
        """Return a layer's output x as a new array: a model may keep what it gave the layer."""
        self._returned = mx.array(x)
        return self._returned

    def find(self, args: Sequence[Any], options: Mapping[str, Any]) -> int | str:
        """Place or name of the argument that the previous layer returned, else the first."""
        places: list[int | str] = [*range(len(args)), *options]
        for place, value in zip(places, (*args, *options.values()), strict=True):
            if value is not None and value is self._returned:
                return place
        return places[0]


class RemoteLayer(nn.Module):  # type: ignore[misc]  # mlx's nn has no types
    """Takes the place of a layer of another rank."""

    def __init__(self, layer: nn.Module, passage: Passage) -> None:
        super().__init__()
        # Hidden: its weights are not this rank's.
        dict.__setitem__(self, "_layer", layer)
        self._passage = (passage,)

    def __call__(self, *args: Any, **options: Any) -> mx.array:
        (passage,) = self._passage
        place = passage.find(args, options)
        x: mx.array = args[place] if isinstance(place, int) else options[place]
        for value in (*args, *options.values()):
            for cache in _leaves(value):
                _pass_by(cache, x.shape[1])
        return passage.returned(x)

    def __getattr__(self, name: str) -> Any:
        return self[name] if name in self else getattr(self["_layer"], name)


class Stage(nn.Module):  # type: ignore[misc]
    """A layer at an edge of this rank's part."""

    def __init__(
        self,
        layer: nn.Module,
        passage: Passage,
        group: RankGroup,
        source: int | None,
        target: int | None,
    ) -> None:
        """source, target: the ranks that it receives from and sends to; None for neither."""
        super().__init__()
        dict.__setitem__(self, "layer", layer)
        self._around = passage, group  # not modules
        self._ends = source, target

    def __call__(self, *args: Any, **options: Any) -> mx.array:
        (passage, group), (source, target) = self._around, self._ends
        if source is not None:
            place = passage.find(args, options)
            if isinstance(place, int):
                received = group.receive_like(args[place], source)
                args = *args[:place], received, *args[place + 1 :]
            else:
                options = {**options, place: group.receive_like(options[place], source)}
        x = self.layer(*args, **options)
        return x if target is None else passage.returned(group.send(x, target))

    def __getattr__(self, name: str) -> Any:
        return self[name] if name in self else getattr(self["layer"], name)


class NoEmbedding(nn.Module):  # type: ignore[misc]
    """The embedding of ranks where tokens do not enter: only its shape matters."""

    def __init__(self, width: int, dtype: mx.Dtype) -> None:
        super().__init__()
        self._width, self._dtype = width, dtype

    def __call__(self, tokens: mx.array) -> mx.array:
        return mx.zeros((*tokens.shape, self._width), self._dtype)


def split_by_layers(model: nn.Module, group: RankGroup, name: str) -> None:
    """Reduce `model`, whose weights are not evaluated, to this rank's part.

    Raises UnsupportedModel.
    """
    layers = list(model.layers)
    check_layers(len(layers), group.size, name)
    mine = parts(len(layers), group.size)[group.rank]
    replaced: dict[int, nn.Module] = {}
    passage = Passage()
    for index, layer in enumerate(layers):
        if index not in mine:
            replaced[id(layer)] = RemoteLayer(layer, passage)
            continue
        source = group.rank + 1 if index == mine[0] and group.rank < group.size - 1 else None
        target = group.rank - 1 if index == mine[-1] and group.rank > 0 else None
        if source is not None or target is not None:
            replaced[id(layer)] = Stage(layer, passage, group, source, target)
    for layer_list in _lists(
        model
    ):  # `model.layers` may be a copy of the one that the model runs through
        layer_list[:] = [replaced.get(id(layer), layer) for layer in layer_list]
    if not group.has_embedding:
        _drop_embedding(model)


def check_layers(count: int, num_ranks: int, name: str) -> None:
    """Raises UnsupportedModel if there are fewer layers than ranks."""
    if count < num_ranks:
        raise UnsupportedModel(
            f"{name} has {count} layers, fewer than pipeline_parallel_size={num_ranks}."
        )


def parts(count: int, size: int) -> list[range]:
    """Layers of each rank. Low ranks have the last ones, and one more if sizes differ."""
    base, extra = divmod(count, size)
    lengths = [base + (rank < extra) for rank in range(size)]
    ends = [sum(lengths[rank:]) for rank in range(size)]
    return [range(end - length, end) for end, length in zip(ends, lengths, strict=True)]


def is_remote(cache: Any) -> bool:
    """True if a dense cache belongs to another rank's layer."""
    return hasattr(cache, _MARK)


def _pass_by(cache: Any, num_tokens: int) -> None:
    """Advance a dense cache as its layer would: models make all masks from one layer's cache."""
    setattr(cache, _MARK, True)
    if isinstance(cache, _PAIRS):
        nothing = mx.zeros((1, 1, num_tokens, 1))
        cache.update_and_fetch(nothing, nothing)


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, CacheList):
        for inner in value.caches:
            yield from _leaves(inner)
    elif isinstance(value, (*_PAIRS, ArraysCache)):
        yield value


def _lists(model: nn.Module) -> Iterator[list[nn.Module]]:
    """Every list in the model that holds its layers."""
    known = {id(layer) for layer in model.layers}
    for module in list(model.modules()):
        for value in module.values():
            if isinstance(value, list) and any(id(layer) in known for layer in value):
                yield value


def _drop_embedding(model: nn.Module) -> None:
    """Replace the embedding, unless it is also the head."""
    modules = list(model.modules())
    if not any(isinstance(module.get("lm_head"), nn.Module) for module in modules):
        return
    for module in modules:
        inner = module.get("embed_tokens")
        if isinstance(inner, (nn.Embedding, nn.QuantizedEmbedding)):
            is_packed = isinstance(inner, nn.QuantizedEmbedding)
            width = inner.dims if is_packed else inner.weight.shape[-1]
            dtype = (inner.scales if is_packed else inner.weight).dtype
            module.embed_tokens = NoEmbedding(width, dtype)

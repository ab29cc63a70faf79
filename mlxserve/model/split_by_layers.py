"""A model's part by layers, without code for any architecture.

    rank N-1   embedding, first layers ──> ... ──> rank 0   last layers, head

Every layer keeps its place in the model's list, so that indices, masks and caches stay right: another
rank's layer is replaced by `RemoteLayer`, which returns what it is given, and the layers at the edges of
a part by `Stage`, which receives before its layer or sends after it. Tokens enter at the last rank
because the ring sends to neighbours only, and rank 0 samples.

Gemma 4's layers return their keys as well, for later layers without any. Where those are on the same rank,
nothing but hidden states is sent; other ranks' layers return None in place of keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.cache import ArraysCache, CacheList, ChunkedKVCache, KVCache, RotatingKVCache

from mlxserve.core.errors import UnsupportedModel
from mlxserve.model.rank_group import RankGroup

_MARK = "_mlxserve_remote"
_NUM_LAYERS = "num_hidden_layers"  # by which definitions make caches
# What layers return after their hidden states, by the modules that define them: what other ranks put in its place.
_RETURNED_MORE: Mapping[str, tuple[Any, ...]] = {"mlx_lm.models.gemma4_text": (None, None)}
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
        self._more = _RETURNED_MORE.get(type(layer).__module__, ())

    def __call__(self, *args: Any, **options: Any) -> Any:
        (passage,) = self._passage
        place = passage.find(args, options)
        x: mx.array = args[place] if isinstance(place, int) else options[place]
        for value in (*args, *options.values()):
            for cache in _leaves(value):
                _pass_by(cache, x.shape[1])
        returned = passage.returned(x)
        return (returned, *self._more) if self._more else returned

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

    def __call__(self, *args: Any, **options: Any) -> Any:
        (passage, group), (source, target) = self._around, self._ends
        if source is not None:
            place = passage.find(args, options)
            if isinstance(place, int):
                received = group.receive_like(args[place], source)
                args = *args[:place], received, *args[place + 1 :]
            else:
                options = {**options, place: group.receive_like(options[place], source)}
        x = self.layer(*args, **options)
        if target is None:
            return x
        if isinstance(x, tuple):
            return passage.returned(group.send(x[0], target)), *x[1:]
        return passage.returned(group.send(x, target))

    def __getattr__(self, name: str) -> Any:
        return self[name] if name in self else getattr(self["layer"], name)


class NoEmbedding(nn.Module):  # type: ignore[misc]
    """The embedding of ranks where tokens do not enter: only its shape matters.

    whole: the embedding itself, whose weights are not read unless something drafts with them
    """

    def __init__(self, whole: nn.Embedding | nn.QuantizedEmbedding) -> None:
        super().__init__()
        self._whole = (whole,)  # no module of this one
        is_packed = isinstance(whole, nn.QuantizedEmbedding)
        self._width: int = whole.dims if is_packed else whole.weight.shape[-1]
        self._dtype: mx.Dtype = (whole.scales if is_packed else whole.weight).dtype

    @property
    def whole(self) -> nn.Module:
        """The embedding that it stands for."""
        return self._whole[0]

    def __call__(self, tokens: mx.array) -> mx.array:
        return mx.zeros((*tokens.shape, self._width), self._dtype)


def split_by_layers(model: nn.Module, group: RankGroup, name: str) -> None:
    """Reduce `model`, whose weights are not evaluated, to this rank's part.

    Raises UnsupportedModel.
    """
    layers = list(model.layers)
    check_layers(len(layers), group.size, name)
    _check_shared_keys(model, parts(len(layers), group.size), name)
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


def _check_shared_keys(model: nn.Module, ranks: Sequence[range], name: str) -> None:
    """Raises UnsupportedModel if a layer without keys of its own reads those of another rank's."""
    rank_of = {layer: rank for rank, part in enumerate(ranks) for layer in part}
    for module in model.modules():
        for layer, owner in enumerate(getattr(module, "previous_kvs", ())):
            if rank_of[layer] != rank_of[owner]:
                raise UnsupportedModel(
                    f"{name}: this {model.model_type} model cannot be split over "
                    f"pipeline_parallel_size={len(ranks)} ranks, because its layer {layer} reads the keys of layer "
                    f"{owner}, which another rank would have. It works in one process."
                )


def parts(count: int, size: int) -> list[range]:
    """Layers of each rank. Low ranks have the last ones, and one more if sizes differ."""
    base, extra = divmod(count, size)
    lengths = [base + (rank < extra) for rank in range(size)]
    ends = [sum(lengths[rank:]) for rank in range(size)]
    return [range(end - length, end) for end, length in zip(ends, lengths, strict=True)]


def places_of(model: nn.Module) -> tuple[dict[str, str], dict[str, nn.Module]]:
    """Return (paths here, modules of other ranks), both by the paths in the undivided model."""
    here: dict[str, str] = {}
    elsewhere: dict[str, nn.Module] = {}
    stages = []
    for path, module in model.named_modules():
        if isinstance(module, RemoteLayer):
            inner = module["_layer"].named_modules()
            elsewhere.update({f"{path}.{name}" if name else path: each for name, each in inner})
            continue
        if isinstance(module, Stage):
            stages.append(path)
        here[_in_whole(path, stages)] = path
        if isinstance(module, NoEmbedding):
            elsewhere[path] = module
    return here, elsewhere


def _in_whole(path: str, stages: Sequence[str]) -> str:
    for stage in stages:
        if path.startswith(f"{stage}.layer.") or path == f"{stage}.layer":
            return stage + path.removeprefix(f"{stage}.layer")
    return path


def own_layers(layers: Sequence[nn.Module]) -> Iterator[tuple[int, nn.Module]]:
    """Yield this rank's layers with their indices, without what `split_by_layers` puts around them."""
    for index, layer in enumerate(layers):
        if not isinstance(layer, RemoteLayer):
            yield index, layer["layer"] if isinstance(layer, Stage) else layer


def keep_first_layers(model: nn.Module, count: int) -> None:
    """Drop all layers after the first `count`, whose weights are then not evaluated with the model."""
    total = len(model.layers)
    lists = list(_lists(model))
    for module in list(model.modules()):
        for owner in (module, getattr(module, "args", None), getattr(module, "config", None)):
            if getattr(owner, _NUM_LAYERS, None) == total:
                setattr(owner, _NUM_LAYERS, count)
    for layers in lists:
        del layers[count:]


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
            module.embed_tokens = NoEmbedding(inner)


def restore_embedding(model: nn.Module) -> None:
    """Give a rank the embedding without which it was loaded; its weights are not evaluated. Idempotent."""
    for module in list(model.modules()):
        if isinstance(inner := module.get("embed_tokens"), NoEmbedding):
            module.embed_tokens = inner.whole


def missing_embedding_size(model: nn.Module) -> int:
    """Return the bytes that `restore_embedding` adds to a rank's weights."""
    missing = [m for m in model.modules() if isinstance(m, NoEmbedding)]
    return sum(a.nbytes for each in missing for _, a in tree_flatten(each.whole.parameters()))

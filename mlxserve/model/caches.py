"""CacheTree: which kind of cache each layer of a model uses, as mlx-lm makes them.

`make_prompt_cache` returns a list; a layer with several caches has a list of its own in it. Each
leaf is replaced for a step:

    KVCache, RotatingKVCache, ChunkedKVCache    keys and values: pages
    ArraysCache                                 a recurrent state: a slot for each sequence

What kind a leaf is, and its shapes, come from short dense forwards (`look_at`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    KVCache,
    RotatingKVCache,
    make_prompt_cache,
)

from metal_kernels.reading import evaluate
from mlxserve.cache.kv import LayerSpec
from mlxserve.errors import UnsupportedModel
from mlxserve.model import recurrent
from mlxserve.model.paged import watching_attention
from mlxserve.model.states import StateSpec

log = logging.getLogger("mlxserve.caches")

MODELS_PAGE = "docs/models.md"
_KEYS_AND_VALUES = (KVCache, RotatingKVCache, ChunkedKVCache)
_MODEL_ERRORS = (
    OSError,
    ValueError,
    KeyError,
    TypeError,
    RuntimeError,
    AttributeError,
    ImportError,
    LookupError,
    ArithmeticError,
    AssertionError,
)


@dataclass(frozen=True, slots=True)
class KVLeaf:
    """Keys and values: the index of its LayerSpec."""

    index: int


@dataclass(frozen=True, slots=True)
class StateLeaf:
    """A recurrent state: the index of its StateSpec."""

    index: int


Node: TypeAlias = "KVLeaf | StateLeaf | tuple[Node, ...]"


@dataclass(frozen=True, slots=True)
class CacheTree:
    """The caches of a model's layers, in the order of its list, and their shapes."""

    nodes: tuple[Node, ...]
    layers: tuple[LayerSpec, ...]
    states: tuple[StateSpec, ...] = ()

    @classmethod
    def of_layers(cls, layers: Sequence[LayerSpec]) -> CacheTree:
        """Of a model whose layers have nothing but keys and values, one pair each."""
        return cls(tuple(map(KVLeaf, range(len(layers)))), tuple(layers))

    def build(self, kv: Callable[[int], Any], state: Callable[[int], Any]) -> list[Any]:
        """The list to call the model with: `kv` and `state` make a leaf from its index."""
        return [_replacement(node, kv, state) for node in self.nodes]


def _replacement(node: Node, kv: Callable[[int], Any], state: Callable[[int], Any]) -> Any:
    if isinstance(node, KVLeaf):
        return kv(node.index)
    if isinstance(node, StateLeaf):
        return state(node.index)
    return CacheList(*[_replacement(inner, kv, state) for inner in node])


def look_at(model: nn.Module, name: str, kind: str) -> tuple[CacheTree, int]:
    """(the model's caches, vocabulary size), from a forward of two tokens and one of a third.

    config.json may omit shapes: the architecture's class has defaults. Prepares recurrent modules
    for LayerState. Raises UnsupportedModel.
    """
    caches = make_prompt_cache(model)
    leaves = list(_leaves(caches))
    for cache in leaves:
        if type(cache) not in (*_KEYS_AND_VALUES, ArraysCache):
            raise UnsupportedModel(
                f"{name}: {kind} models keep what they have read in a form of their own "
                f"({type(cache).__name__}), which mlxserve cannot store. Models that work: "
                f"{MODELS_PAGE}."
            )
    states = {id(cache) for cache in leaves if type(cache) is ArraysCache}
    try:
        with recurrent.finding_modules(model, states) as modules:
            evaluate(model(mx.array([[1, 2]]), cache=caches))
        with watching_attention() as seen:
            logits = model(mx.array([[1]]), cache=caches)
            evaluate(logits)
    except _MODEL_ERRORS as error:
        log.info("%s: the model fails on three tokens", name, exc_info=error)
        raise UnsupportedModel(
            f"{name}: this {kind} model fails on its first tokens: its files do not fit together, or "
            "mlx-lm cannot run it on this machine. The log has the details."
        ) from error
    if unused := [index for index, cache in enumerate(leaves) if cache.empty()]:
        raise UnsupportedModel(
            f"{name}: layers {unused} of this {kind} model store neither keys and values nor a "
            f"state, and mlxserve does not know how to page it. Models that work: {MODELS_PAGE}."
        )
    recurrent.use_groups(modules)
    return _tree(caches, seen.latent), int(logits.shape[-1])


def _tree(caches: Sequence[Any], latent: set[int]) -> CacheTree:
    layers: list[LayerSpec] = []
    states: list[StateSpec] = []
    nodes = tuple(_node(cache, latent, layers, states) for cache in caches)
    return CacheTree(nodes, tuple(layers), tuple(states))


def _node(cache: Any, latent: set[int], layers: list[LayerSpec], states: list[StateSpec]) -> Node:
    """What stands for a cache; its shapes are added to those of the others."""
    if type(cache) is CacheList:
        return tuple(_node(inner, latent, layers, states) for inner in cache.caches)
    if type(cache) is ArraysCache:
        states.append(StateSpec(tuple((tuple(a.shape[1:]), a.dtype) for a in cache.cache)))
        return StateLeaf(len(states) - 1)
    layers.append(_spec(cache, is_latent=id(cache) in latent))
    return KVLeaf(len(layers) - 1)


def _leaves(caches: Sequence[Any]) -> Iterator[Any]:
    for cache in caches:
        if type(cache) is CacheList:
            yield from _leaves(cache.caches)
        else:
            yield cache


def _spec(cache: Any, *, is_latent: bool) -> LayerSpec:
    window = cache.max_size if isinstance(cache, RotatingKVCache) else None
    return LayerSpec(
        kv_heads=cache.keys.shape[1],
        key_dim=cache.keys.shape[-1],
        value_dim=cache.values.shape[-1],
        dtype=cache.keys.dtype,
        window=window,
        is_latent=is_latent,
    )

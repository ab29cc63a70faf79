"""CacheTree: the kind of cache of each layer of a model, as mlx-lm makes them.

`make_prompt_cache` returns a list; a layer with several caches has a list of its own in it. Each
leaf is replaced for a step:

    KVCache, RotatingKVCache, ChunkedKVCache    keys and values: pages
    ArraysCache                                 a recurrent state: a slot for each sequence
    any of them, of another rank's layer        only what masks are made from

A leaf's kind and shapes come from short dense forwards (`look_at`).
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
from mlxserve.core.errors import UnsupportedModel
from mlxserve.model import recurrent
from mlxserve.model.definitions import stands_for
from mlxserve.model.packed_states import StateSpec
from mlxserve.model.paged import watching_attention
from mlxserve.model.rank_group import RankGroup, Split
from mlxserve.model.refusals import compiler_failure
from mlxserve.model.split_by_layers import RemoteLayer, is_remote

log = logging.getLogger("mlxserve.caches")

MODELS_PAGE = "docs/models.md"
_KEYS_AND_VALUES = (KVCache, RotatingKVCache, ChunkedKVCache)
MODEL_ERRORS = (  # errors of a definition for a config that it cannot compute
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
    """A cache of keys and values: the index of its LayerSpec."""

    index: int


@dataclass(frozen=True, slots=True)
class StateLeaf:
    """A recurrent state: the index of its StateSpec."""

    index: int


@dataclass(frozen=True, slots=True)
class ElsewhereLeaf:
    """A cache of another rank's layer: keys and values with this window, or a state."""

    is_state: bool
    window: int | None = None


Node: TypeAlias = "KVLeaf | StateLeaf | ElsewhereLeaf | tuple[Node, ...]"


@dataclass(frozen=True, slots=True)
class CacheTree:
    """The caches of a model's layers, in the order of its list, and their shapes.

    state_class: the class of cache that its recurrent modules take
    """

    nodes: tuple[Node, ...]
    layers: tuple[LayerSpec, ...]
    states: tuple[StateSpec, ...] = ()
    state_class: type = ArraysCache

    @property
    def has_states(self) -> bool:
        """True if a layer of any rank keeps a recurrent state."""
        return any(
            isinstance(leaf, StateLeaf) or (isinstance(leaf, ElsewhereLeaf) and leaf.is_state)
            for leaf in _flat(self.nodes)
        )

    @property
    def windows(self) -> list[int]:
        """Window sizes of the sliding-window layers of all ranks."""
        windows = [spec.window for spec in self.layers]
        windows += [leaf.window for leaf in _flat(self.nodes) if isinstance(leaf, ElsewhereLeaf)]
        return [window for window in windows if window is not None]

    def build(
        self,
        kv: Callable[[int], Any],
        state: Callable[[int], Any],
        elsewhere: Callable[[ElsewhereLeaf], Any] | None = None,
    ) -> list[Any]:
        """Build the caches for a call of the model; `kv` and `state` map an index to a leaf."""
        return [_replacement(node, kv, state, elsewhere) for node in self.nodes]


def _replacement(
    node: Node,
    kv: Callable[[int], Any],
    state: Callable[[int], Any],
    elsewhere: Callable[[ElsewhereLeaf], Any] | None,
) -> Any:
    # Not a closure that calls itself: such a ring would keep a step's arrays until it is collected.
    if isinstance(node, StateLeaf):
        return state(node.index)
    if isinstance(node, KVLeaf):
        return kv(node.index)
    if isinstance(node, ElsewhereLeaf):
        assert elsewhere is not None, "all layers are this process's"
        return elsewhere(node)
    return CacheList(*[_replacement(inner, kv, state, elsewhere) for inner in node])


def _flat(nodes: Sequence[Node]) -> Iterator[KVLeaf | StateLeaf | ElsewhereLeaf]:
    for node in nodes:
        if isinstance(node, tuple):
            yield from _flat(node)
        else:
            yield node


def look_at(
    model: nn.Module, name: str, kind: str, group: RankGroup | None = None
) -> tuple[CacheTree, int]:
    """Return (the model's caches, vocabulary size), from a forward of two tokens and one more.

    config.json may omit shapes: the architecture's class has defaults. Prepares recurrent modules
    for LayerState. Raises UnsupportedModel. `group`: the ranks that share the model.
    """
    caches = make_prompt_cache(model)
    leaves = list(_leaves(caches))
    for cache in leaves:
        if stands_for(type(cache)) not in (*_KEYS_AND_VALUES, ArraysCache):
            raise UnsupportedModel(
                f"{name}: {kind} models keep what they have read in a form of their own "
                f"({type(cache).__name__}), which mlxserve cannot store. Models that work: "
                f"{MODELS_PAGE}."
            )
    states = {id(cache) for cache in leaves if _is_state(cache)}
    try:
        with recurrent.finding_modules(model, states) as modules:
            evaluate(model(mx.array([[1, 2]]), cache=caches))
        with watching_attention() as seen:
            logits = model(mx.array([[1]]), cache=caches)
            evaluate(logits)
    except MODEL_ERRORS as error:
        log.info("%s: the model fails on three tokens", name, exc_info=error)
        reason = (
            "its files do not fit together, or its definition cannot be computed on this machine"
        )
        if group is not None:
            reason = f"it may not be possible to split its kind by {group.split}"
        raise UnsupportedModel(
            compiler_failure(name, error)
            or f"{name}: this {kind} model fails on its first tokens: {reason}. The log has the details."
        ) from error
    owners = [int(not cache.empty() and not is_remote(cache)) for cache in leaves]
    if group is not None:
        _check_split(group, owners, f"{name}: {kind} models")
        owners = [owner or is_remote(cache) for owner, cache in zip(owners, leaves, strict=True)]
    if unused := [index for index, owner in enumerate(owners) if not owner]:
        raise UnsupportedModel(
            f"{name}: layers {unused} of this {kind} model store neither keys and values nor a "
            f"state, and mlxserve does not know how to page it. Models that work: {MODELS_PAGE}."
        )
    recurrent.use_groups(modules - {RemoteLayer})  # it passes every cache by
    return _tree(caches, seen.latent), int(logits.shape[-1])


def _check_split(group: RankGroup, owned: Sequence[int], what: str) -> None:
    """Raises UnsupportedModel unless all ranks, or exactly one, filled each layer's cache.

    The probe cannot see a wrong split, because both of its sides are split.
    """
    wanted = 1 if group.split is Split.LAYERS else group.size
    ranks = group.all_of(owned)
    if any(sum(owners) != wanted for owners in zip(*ranks, strict=True)):
        raise UnsupportedModel(
            f"{what} cannot be split by {group.split}: a layer would be computed by several ranks, or "
            "by none."
        )
    if not all(map(any, ranks)):
        raise UnsupportedModel(
            f"{what} cannot be split over {group.size} ranks: one would have no attention layer. Use "
            "fewer."
        )


def _tree(caches: Sequence[Any], latent: set[int]) -> CacheTree:
    layers: list[LayerSpec] = []
    states: list[StateSpec] = []
    nodes = tuple(_node(cache, latent, layers, states) for cache in caches)
    kinds = (type(cache) for cache in _leaves(caches) if _is_state(cache))
    return CacheTree(nodes, tuple(layers), tuple(states), next(kinds, ArraysCache))


def _node(cache: Any, latent: set[int], layers: list[LayerSpec], states: list[StateSpec]) -> Node:
    """Return a cache's node and append its shapes to `layers` or `states`."""
    if _is_list(cache):
        return tuple(_node(inner, latent, layers, states) for inner in cache.caches)
    if is_remote(cache):
        return ElsewhereLeaf(_is_state(cache), _window(cache))
    if _is_state(cache):
        states.append(StateSpec(tuple((tuple(a.shape[1:]), a.dtype) for a in cache.cache)))
        return StateLeaf(len(states) - 1)
    layers.append(_spec(cache, is_latent=id(cache) in latent))
    return KVLeaf(len(layers) - 1)


def _leaves(caches: Sequence[Any]) -> Iterator[Any]:
    for cache in caches:
        if _is_list(cache):
            yield from _leaves(cache.caches)
        else:
            yield cache


def _is_list(cache: Any) -> bool:
    return stands_for(type(cache)) is CacheList


def _is_state(cache: Any) -> bool:
    return stands_for(type(cache)) is ArraysCache


def _spec(cache: Any, *, is_latent: bool) -> LayerSpec:
    return LayerSpec(
        kv_heads=cache.keys.shape[1],
        key_dim=cache.keys.shape[-1],
        value_dim=cache.values.shape[-1],
        dtype=cache.keys.dtype,
        window=_window(cache),
        is_latent=is_latent,
    )


def _window(cache: Any) -> int | None:
    return cache.max_size if stands_for(type(cache)) is RotatingKVCache else None

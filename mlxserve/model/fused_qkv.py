"""Attention with fewer kernels: one product, then one kernel for norms, RoPE and the KV write.

    mlx-lm     q_proj, k_proj, v_proj, q_norm, k_norm, RoPE, RoPE, write   |  attention  |  o_proj
    here       product              , rotate_and_write                     |  attention  |  o_proj

A definition is not known by its name. A layer that has projections, RoPE and perhaps norms by the
usual names is called as it is, with a cache that records the queries, keys and values which reach
attention, at positions up to its context's end; it is fused only if `rotate_and_write` makes the
same of the same rows, and if the same becomes of attention's answer. Everything else (clipped
queries, scales that grow with the position) differs in that trial, and stays as it is. Then the load-time probe compares the whole model's logits.

Only the paged path is changed: with any other cache a layer is called as mlx-lm defines it.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from metal_kernels import rotary
from metal_kernels.kernels import SMALLEST_INPUT
from metal_kernels.ops import Epsilon, Heads, Norms, Projected
from metal_kernels.reading import read
from mlxserve.cache.layer_kv import LayerKV
from mlxserve.model.caches import MODEL_ERRORS
from mlxserve.model.joined_products import JoinedProduct, can_join, input_width, is_near

log = logging.getLogger("mlxserve.fused_qkv")

_PROJECTIONS = ("q_proj", "k_proj", "v_proj")
_VALUES_ARE_KEYS = ("q_proj", "k_proj", "k_proj")  # before norms and rotations, as in Gemma 4
# Parameters after `x`. With the last two a layer also returns its keys and values, for later layers that have none,
# and its offset.
_PARAMETERS = ["mask", "cache"]
_SHARED_PARAMETERS = [*_PARAMETERS, "shared_kv", "offset"]
_OUTPUTS = ("o_proj", "out_proj", "dense")
_ROPES = ("rope", "rotary_emb")
_NORMS = (
    ("q_norm", "k_norm"),
    ("query_layernorm", "key_layernorm"),
    ("q_layernorm", "k_layernorm"),
)
_POSITIONS = (0, 1, 2, 63, 1_000, 4_097, 20_000)  # rows of a trial, beside the context's last
_MARK = "_mlxserve_fused"


@dataclass(frozen=True, slots=True, eq=False)
class Rope:
    """A module that rotates pairs of dimensions by position; see `LayerKV.turns`."""

    module: Any
    rotated: int
    basis: mx.array  # (1, 0) of each pair, rotated to its cosine and sine

    @classmethod
    def from_module(cls, module: Any, rotated: int, *, is_traditional: bool) -> Rope:
        half = rotated // 2
        ones = [1.0, 0.0] * half if is_traditional else [1.0] * half + [0.0] * half
        return cls(module, rotated, mx.array(ones, mx.float32).reshape(1, 1, 1, rotated))

    def turns(self, positions: mx.array) -> mx.array:
        shape = (positions.size, 1, 1, self.rotated)
        turns: mx.array = self.module(mx.broadcast_to(self.basis, shape), offset=positions)
        return turns


class NoRope:
    """Takes the place of Rope in layers without positions."""

    rotated = 0

    def turns(self, positions: mx.array) -> mx.array:  # noqa: ARG002
        return mx.zeros(SMALLEST_INPUT)


@dataclass(frozen=True, slots=True)
class FusedQKV:
    """Replaces an attention layer's call."""

    projections: tuple[str, str, str]  # names of those of queries, keys and values
    product: JoinedProduct | None  # None if the layer's own are called one by one
    output_name: str  # name of the last projection
    rope: Rope | NoRope
    heads: Heads
    norms: Norms
    scale: float
    softcap: float | None
    sinks: mx.array | None
    is_gated: bool  # the gate of its answer lies beside each query

    def __call__(self, layer: Any, x: mx.array, mask: object, cache: LayerKV) -> mx.array:
        """Return the shape of x: rows (T, 1, hidden), or a chunk (1, T, hidden)."""
        projected = self.projected(layer, x)
        turns = cache.turns(self.rope)
        queries = cache.rotate_and_write(projected, turns, self.heads, self.norms)
        answer = cache.attend(
            queries, scale=self.scale, mask=mask, softcap=self.softcap, sinks=self.sinks
        )
        return self.output(layer, answer, projected)

    def projected(self, layer: Any, x: mx.array) -> Projected:
        if self.product is not None:
            return (self.product(x),)
        made = {name: layer[name](x) for name in dict.fromkeys(self.projections)}
        return [made[name] for name in self.projections]

    def output(self, layer: Any, answer: mx.array, projected: Projected) -> mx.array:
        """Project attention's output, (T, heads, 1, dim)."""
        batch, length, _ = projected[0].shape
        rows = answer.reshape(batch, length, -1)
        if self.is_gated:
            both = projected[0]
            if self.product is not None:  # `split` takes the host half as long as slices
                both = mx.split(both, [self.heads.widths[0]], axis=-1)[0]
            gates = mx.split(both.reshape(batch, length, self.heads.num, -1), 2, axis=-1)[1]
            rows = rows * mx.sigmoid(gates.reshape(batch, length, -1))
        output: mx.array = layer[self.output_name](rows)  # not by __getattr__, which is Python's
        return output


def fuse_qkv(model: nn.Module, dtype: mx.Dtype, context: int) -> list[nn.Module]:
    """Fuse attention layers of `model` and return those that are fused.

    dtype: of the rows; context: positions
    """
    ropes: dict[object, Rope | NoRope] = {}
    fused = []
    for layer in list(model.modules()):
        if not _may_be_attention(layer):
            continue
        candidate = _recognised(layer, dtype, context)
        if candidate is None:
            log.info(
                "%s keeps its own kernels: it is not the usual attention", type(layer).__name__
            )
            continue
        candidate = replace(
            candidate, rope=ropes.setdefault(_kind(candidate, context), candidate.rope)
        )
        layers = [layer[name] for name in candidate.projections]
        if candidate.projections == _PROJECTIONS and can_join(layers):
            candidate = replace(candidate, product=JoinedProduct(layers))
        _extend(type(layer))
        vars(layer)[_MARK] = candidate
        fused.append(layer)
    return fused


def num_fused(model: nn.Module) -> int:
    """Number of fused attention layers in `model`."""
    return sum(_MARK in vars(module) for module in model.modules())


def attention_product(module: nn.Module) -> JoinedProduct | None:
    """Return the joined projections of a fused attention layer; None for any other module."""
    fused: FusedQKV | None = vars(module).get(_MARK)
    return None if fused is None else fused.product


def separate(layers: Sequence[nn.Module]) -> None:
    """Undo `fuse_qkv`. The weights stay side by side."""
    for layer in layers:
        del vars(layer)[_MARK]


def _may_be_attention(layer: Any) -> bool:
    has_layers = all(isinstance(layer.get(name), nn.Module) for name in _VALUES_ARE_KEYS)
    has_output = any(isinstance(layer.get(name), nn.Module) for name in _OUTPUTS)
    if not (has_layers and has_output):
        return False
    parameters = _parameters(type(layer).__call__)
    # What a later layer would read is not made: `rotate_and_write` leaves it in the pages.
    is_read = getattr(getattr(layer, "config", None), "num_kv_shared_layers", 1)
    return parameters == _PARAMETERS or (parameters == _SHARED_PARAMETERS and not is_read)


def _parameters(call: Any) -> list[str]:
    """Names of the parameters after the layer and its input."""
    return list(inspect.signature(call).parameters)[2:]


def _extend(kind: Any) -> None:
    """Dispatch this class's calls to the fused path where they are paged. Idempotent."""
    original = kind.__call__
    if hasattr(original, _MARK):
        return

    _, input_name, *_ = inspect.signature(original).parameters
    returns_more = _parameters(original) == _SHARED_PARAMETERS

    @functools.wraps(original)
    def call(self: Any, x: Any = None, mask: Any = None, cache: Any = None, **named: Any) -> Any:
        if input_name in named:
            x = named.pop(input_name)
        fused = vars(self).get(_MARK)
        if fused is None or not isinstance(cache, LayerKV):
            return original(self, x, mask, cache, **named)
        output = fused(self, x, mask, cache)
        return (output, None, cache.offset) if returns_more else output

    setattr(call, _MARK, True)
    kind.__call__ = call


def _kind(fused: FusedQKV, context: int) -> object:
    """A key: layers with equal ones rotate rows alike."""
    if isinstance(fused.rope, NoRope):
        return None
    turns = read(fused.rope.turns(_positions(context)))
    return fused.rope.rotated, fused.heads.is_traditional, turns.tobytes()


def _positions(context: int) -> mx.array:
    return mx.array([*_POSITIONS, max(0, context - 1)], mx.int32)


class _Noting(LayerKV):
    """A cache that stores nothing and records what an attention layer passes to it."""

    def __init__(self, positions: mx.array) -> None:
        self.offset = positions
        self.written: tuple[mx.array, mx.array] | None = None
        self.queries = self.answer = mx.zeros(0)
        self.options: dict[str, Any] = {}

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        assert self.written is None, "it is written once"
        self.written = keys, values
        return keys, values

    def attend(self, queries: mx.array, **options: Any) -> mx.array:
        assert self.written is not None, "what is attended over is written before"
        self.queries, self.options = queries, options
        shape = (*queries.shape[:3], self.written[1].shape[-1])
        self.answer = mx.random.normal(shape, key=mx.random.key(1)).astype(queries.dtype)
        return self.answer


def _recognised(layer: Any, dtype: mx.Dtype, context: int) -> FusedQKV | None:
    """Return an equivalent of `layer` with separate projections; None if none is known."""
    cache = _Noting(_positions(context))
    rows = cache.offset.size
    mask = object()
    try:
        x = mx.random.normal((rows, 1, input_width(layer.q_proj)), key=mx.random.key(0)).astype(
            dtype
        )
        returned = layer(x, mask, cache)
        output = returned[0] if isinstance(returned, tuple) else returned
        if cache.written is None or cache.options.get("mask") is not mask:
            return None
        for candidate in _candidates(layer, cache):
            projected = candidate.projected(layer, x)
            turns = candidate.rope.turns(cache.offset)
            rows_made = rotary.rotated(projected, turns, candidate.heads, candidate.norms)
            made = (*rows_made, candidate.output(layer, cache.answer, projected))
            wanted = (cache.queries, *cache.written, output)
            if all(is_near(mine, other) for mine, other in zip(made, wanted, strict=True)):
                return candidate
    except MODEL_ERRORS as error:
        log.debug("%s is not fused", type(layer).__name__, exc_info=error)
    return None


def _candidates(layer: Any, cache: _Noting) -> Iterator[FusedQKV]:
    """Yield what the layer may compute, from its attributes and its recorded call."""
    assert cache.written is not None
    (_, num, _, dim), (_, num_kv, _, value_dim) = cache.queries.shape, cache.written[1].shape
    sinks = cache.options.get("sinks")
    if value_dim != dim or (sinks is not None and not any(sinks is own for own in layer.values())):
        return
    step = len(layer.q_proj.weight) // num
    heads = Heads(num, num_kv, dim, 0, step=step)
    has_values = isinstance(layer.get("v_proj"), nn.Module)
    output_name = next(name for name in _OUTPUTS if isinstance(layer.get(name), nn.Module))
    for norms, epsilon in _norms_of(layer):
        for rope, is_traditional in _ropes_of(layer, dim):
            yield FusedQKV(
                projections=_PROJECTIONS if has_values else _VALUES_ARE_KEYS,
                product=None,
                output_name=output_name,
                rope=rope,
                heads=heads._replace(
                    rotated=rope.rotated, is_traditional=is_traditional, epsilon=epsilon
                ),
                norms=norms,
                scale=cache.options["scale"],
                softcap=cache.options.get("softcap"),
                sinks=sinks,
                is_gated=step == 2 * dim,
            )


def _norms_of(layer: Any) -> Iterator[tuple[Norms, Epsilon]]:
    for names in _NORMS:
        pair = [layer.get(name) for name in names]
        if all(isinstance(norm, nn.Module) for norm in pair):
            weights = [norm["weight"] for norm in pair]
            epsilon: Epsilon = pair[0].eps, pair[1].eps
            if isinstance(of_values := layer.get("v_norm"), nn.Module):
                epsilon = pair[0].eps, pair[1].eps, of_values.eps
            yield (weights[0], weights[1]), epsilon
            yield (1.0 + weights[0], 1.0 + weights[1]), epsilon  # as in Gemma
            return
    yield None, None


def _ropes_of(layer: Any, dim: int) -> Iterator[tuple[Rope | NoRope, bool]]:
    for name in _ROPES:
        module = getattr(layer, name, None)
        if module is not None:
            rotated = getattr(module, "dims", getattr(module, "dim", dim))
            is_traditional = bool(getattr(module, "traditional", False))
            yield Rope.from_module(module, rotated, is_traditional=is_traditional), is_traditional
    yield NoRope(), False

"""Several products of one input as one: matrices side by side, without a second copy.

    before   q_proj.weight (n, K)   k_proj.weight (m, K)   v_proj.weight (m, K)
    after    joined (n + 2 m, K)    the three are views of its rows

So the layers compute what they did wherever they are called alone, and whoever has all three calls
`JoinedProduct`. In quantised and plain products a column of the result does not depend on the
others.

A model that calls the layers one by one, as every gated MLP calls `gate_proj(x)` and `up_proj(x)`
and many recurrent layers their projections, is covered by `share`: the first of them that is given
an input computes all, and the others take their part of it.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from metal_kernels.few_rows import Quantised, as_quantised
from metal_kernels.reading import read
from mlxserve.model.caches import MODEL_ERRORS
from mlxserve.model.recurrent import is_in_groups

_LINEAR = (nn.Linear, nn.QuantizedLinear)
_ARRAYS = ("weight", "scales", "biases", "bias")  # rows of each belong to outputs


class JoinedProduct:
    """Calls layers that `can_join` at once: (..., K) -> (..., the sum of their outputs)."""

    def __init__(self, layers: Sequence[Any]) -> None:
        """Join the layers' arrays, which become views of the joined ones."""
        first = layers[0]
        self.layers = tuple(layers)
        # Of quantised weights, with its arguments; `few_row_products.py` replaces it.
        self.multiply: Callable[..., mx.array] = mx.quantized_matmul
        arrays = {name: _join(layers, name) for name in _ARRAYS if first.get(name) is not None}
        self._weight, self._bias = arrays["weight"], arrays.get("bias")
        self._quantised: tuple[Any, ...] | None = None  # further arguments of the product
        if isinstance(first, nn.QuantizedLinear):
            scales, biases = arrays["scales"], arrays.get("biases")
            self._quantised = scales, biases, True, first.group_size, first.bits, first.mode
        else:
            self._weight = self._weight.T
            mx.eval(self._weight)

    @property
    def quantised(self) -> Quantised | None:
        """The joined weights; None if they are not quantised as MLX's "affine" mode does it."""
        if self._quantised is None:
            return None
        scales, biases, _, group_size, bits, mode = self._quantised
        return as_quantised(self._weight, scales, biases, group_size, bits, mode)

    def __call__(self, x: mx.array) -> mx.array:
        bias = self._bias
        if self._quantised is not None:
            product = self.multiply(x, self._weight, *self._quantised)
            return product if bias is None else product + bias
        if bias is None:
            return x @ self._weight
        return mx.addmm(bias, x, self._weight)


def _join(layers: Sequence[Any], name: str) -> mx.array:
    joined = mx.concatenate([layer[name] for layer in layers])
    mx.eval(joined)
    ends = list(accumulate(len(layer[name]) for layer in layers))
    for layer, begin, end in zip(layers, [0, *ends], ends, strict=False):
        layer[name] = joined[begin:end]
    mx.eval([layer[name] for layer in layers])
    return joined


def can_join(layers: Sequence[Any]) -> bool:
    """True if the layers can be joined.

    They must be of one kind, quantised alike, of one input width and one dtype, and all or none
    with a bias.
    """
    return len(layers) > 1 and len({_kind(layer) for layer in layers}) == 1


def _kind(layer: Any) -> tuple[Any, ...]:
    if type(layer) not in _LINEAR:
        return (id(layer),)
    options = [getattr(layer, name, None) for name in ("group_size", "bits", "mode")]
    arrays = [layer.get(name) for name in _ARRAYS]
    kinds = [None if array is None else (array.dtype, array.shape[1:]) for array in arrays]
    return (type(layer), *options, *kinds)


def input_width(layer: Any) -> int:
    """Input width of an nn.Linear or nn.QuantizedLinear."""
    width: int = layer.weight.shape[1]
    return width * 32 // layer.bits if isinstance(layer, nn.QuantizedLinear) else width


@dataclass(slots=True)
class _Shared:
    """The product of some layers, and its parts from the first layer's call to the last."""

    product: JoinedProduct
    cuts: list[int]  # offsets of the outputs of all layers but the first
    x: mx.array | None = None
    parts: Sequence[mx.array] = ()


class SharedLayer(nn.Module):  # type: ignore[misc]  # mlx's nn has no types
    """A layer whose product is computed together with others."""

    def __init__(self, layer: nn.Module, shared: _Shared, number: int) -> None:
        super().__init__()
        self.layer = layer
        self._shared = shared
        self._number = number  # number in call order

    @property
    def product(self) -> JoinedProduct:
        return self._shared.product

    def __call__(self, x: mx.array) -> mx.array:
        shared, number = self._shared, self._number
        if number == 0:
            shared.x = x
            parts = mx.split(shared.product(x), shared.cuts, axis=-1)
            shared.parts = parts  # type: ignore[assignment]  # a list, which mlx does not say
            return parts[0]
        # The first was called with something else.
        if x is not shared.x:
            return self.layer(x)  # type: ignore[no-any-return]
        part = shared.parts[number]
        if number == len(shared.cuts):
            # A step's arrays are not kept.
            shared.x, shared.parts = None, ()
        return part


@dataclass(frozen=True, slots=True)
class Sharing:
    """Layers of a module that share a product, by name, in call order."""

    parent: nn.Module
    names: tuple[str, ...]

    def undo(self) -> None:
        for name in self.names:
            self.parent[name] = self.parent[name].layer


def share(model: nn.Module, dtype: mx.Dtype) -> list[Sharing]:
    """Share products between layers of modules that pass them the same input.

    These are gated MLPs, and recurrent modules, which also take a mask and a state.

    dtype: of the inputs
    """
    shared = []
    for module in list(model.modules()):
        layers = {name: each for name, each in module.children().items() if type(each) in _LINEAR}
        if len(layers) < 2 or not (_takes_one_input(module) or is_in_groups(type(module))):
            continue
        x = mx.random.normal((2, 1, input_width(next(iter(layers.values())))), key=mx.random.key(0))
        shared += _shared_in(module, layers, x.astype(dtype))
    return shared


def _takes_one_input(module: nn.Module) -> bool:
    try:
        return len(inspect.signature(module.__call__).parameters) == 1
    except (TypeError, ValueError):
        return False


def _shared_in(module: nn.Module, layers: Mapping[str, nn.Module], x: mx.array) -> list[Sharing]:
    """Share products in `module`, if it then computes the same."""
    groups, expected = _observed(module, layers, x)
    sharings = []
    for names in groups:
        members = [layers[name] for name in names]
        if can_join(members):
            sharings.append(Sharing(module, names))
            product, ends = JoinedProduct(members), list(accumulate(map(_output_width, members)))
            shared = _Shared(product, ends[:-1])
            for number, name in enumerate(names):
                module[name] = SharedLayer(layers[name], shared, number)
    if sharings and not _computes(module, x, expected):
        for sharing in sharings:
            sharing.undo()
        return []
    return sharings


def _computes(module: nn.Module, x: mx.array, expected: mx.array) -> bool:
    try:
        return is_near(module(x), expected)
    except MODEL_ERRORS:
        # It looks into a layer, instead of calling it.
        return False


def _observed(
    module: nn.Module, layers: Mapping[str, nn.Module], x: mx.array
) -> tuple[list[tuple[str, ...]], mx.array]:
    """Return (groups of layers that get the same array, the module's output for x)."""
    inputs: list[tuple[str, mx.array]] = []
    for name, layer in layers.items():
        module[name] = _Observed(name, layer, inputs)
    try:
        expected = module(x)
        mx.eval(expected)
    except MODEL_ERRORS:
        # It takes something else than its first layer.
        return [], x
    finally:
        for name, layer in layers.items():
            module[name] = layer
    calls = Counter(name for name, _ in inputs)
    groups: dict[int, list[str]] = {}
    for name, array in inputs:
        if calls[name] == 1:
            groups.setdefault(id(array), []).append(name)
    return [tuple(names) for names in groups.values()], expected


class _Observed(nn.Module):  # type: ignore[misc]
    """A layer that records its input."""

    def __init__(self, name: str, layer: nn.Module, inputs: list[tuple[str, mx.array]]) -> None:
        super().__init__()
        self._name = name
        self._layer = (layer,)  # a tuple hides the layer: it is not one of the model's
        self._note = inputs.append

    def __call__(self, x: mx.array) -> mx.array:
        self._note((self._name, x))
        y: mx.array = self._layer[0](x)
        return y


def _output_width(layer: Any) -> int:
    return len(layer.weight)


def is_near(actual: mx.array, expected: mx.array) -> bool:
    """True if both are equal up to rounding, in units of the largest number."""
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return False
    units = {mx.bfloat16: 2.0**-8, mx.float16: 2.0**-11}.get(actual.dtype, 2.0**-20)
    first, second = actual.astype(mx.float32), expected.astype(mx.float32)
    apart = mx.abs(first - second).max() / mx.maximum(mx.abs(second).max(), 1e-20)
    return bool(read(apart) <= 8 * units)

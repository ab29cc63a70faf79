"""A model's products of two to five rows by one pass of the weights, where a trial finds it faster.

A step that verifies a draft, or has a few answers, multiplies a few rows by every matrix. Quantised
matrices of one shape are one kind of product; `few_rows_trial.py` decides for each kind and number of
rows. What calls mlx's product is replaced in place:

    QuantizedLinear                 -> FewRowLinear, the same object with another class
    QuantizedEmbedding, as a head   -> FewRowEmbedding
    JoinedProduct                   its `multiply`

Experts are not covered: their rows are gathered.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from metal_kernels.few_rows import FewRows, Quantised, as_quantised, refusal
from metal_kernels.few_rows_trial import FewRowsChoice, Timer, fastest, try_few_rows
from metal_kernels.metal import MetalBackend
from metal_kernels.ops import Backend
from mlxserve.model.fused_layers import joined_products
from mlxserve.model.load import LoadedModel

log = logging.getLogger("mlxserve.few_rows")


class FewRowProduct:
    """Multiplies by one matrix: chosen numbers of rows by `FewRows`, others by mlx."""

    def __init__(self, kernel: FewRows, weights: Quantised, choice: FewRowsChoice) -> None:
        self._kernel = kernel
        self._weights = weights
        self._choice = choice
        self._dtype = weights.scales.dtype

    def __call__(self, x: mx.array, *_arguments: object) -> mx.array:
        """Multiply (..., K): (..., N). Takes the arguments of mx.quantized_matmul, too."""
        if x.size // x.shape[-1] in self._choice.rows and x.dtype == self._dtype:
            return self._kernel.product(x, self._weights, self._choice.packs)
        return self._weights.product(x)


class FewRowLinear(nn.QuantizedLinear):  # type: ignore[misc]  # mlx's nn has no types
    """A QuantizedLinear whose products are a FewRowProduct's."""

    def __call__(self, x: mx.array) -> mx.array:
        product: mx.array = self.few_row_product(x)
        return product + self["bias"] if "bias" in self else product


class FewRowEmbedding(nn.QuantizedEmbedding):  # type: ignore[misc]
    """A QuantizedEmbedding whose products as a head are a FewRowProduct's."""

    def as_linear(self, x: mx.array) -> mx.array:
        product: mx.array = self.few_row_product(x)
        return product


_CLASSES = {nn.QuantizedLinear: FewRowLinear, nn.QuantizedEmbedding: FewRowEmbedding}


@dataclass(frozen=True, slots=True)
class _Site:
    """One matrix, and what replaces its product."""

    weights: Quantised
    use: Callable[[FewRowProduct], None]


def use_few_rows(loaded: LoadedModel, backends: Sequence[Backend], timer: Timer = fastest) -> int:
    """Replace products of a model whose layers are all on Metal, where that is faster here.

    Returns the number of matrices. Tokens stay those of the model's own products of single rows.
    timer: seconds, or any other unit, of a function's call
    """
    kernel = _kernel(loaded, backends)
    if kernel is None:
        return 0
    kinds: dict[object, list[_Site]] = {}
    for site in _sites(loaded.model):
        if refusal(site.weights) is None:
            kinds.setdefault(site.weights.kind, []).append(site)
    num_replaced, reasons = 0, []
    for sites in kinds.values():
        choice = try_few_rows(kernel, [site.weights for site in sites], timer)
        if choice.rows:
            num_replaced += len(sites)
            for site in sites:
                site.use(FewRowProduct(kernel, site.weights, choice))
        else:
            reasons.append(choice.reason)
    if kinds:
        mx.clear_cache()
        why = f"; the others not: {'; '.join(dict.fromkeys(reasons))}" if reasons else ""
        log.info(
            "%s: %d of %d matrices are read once for 2 to 5 rows%s",
            loaded.name,
            num_replaced,
            sum(map(len, kinds.values())),
            why,
        )
    return num_replaced


def _kernel(loaded: LoadedModel, backends: Sequence[Backend]) -> FewRows | None:
    """Return the kernel, if all layers are on Metal and in one process."""
    if loaded.by_sequence or loaded.group is not None or not backends:
        return None
    first = backends[0]
    if isinstance(first, MetalBackend) and all(isinstance(each, MetalBackend) for each in backends):
        return first.few_rows
    return None


def _sites(model: nn.Module) -> Iterator[_Site]:
    products = joined_products(model)
    for product in products:
        if (weights := product.quantised) is not None:
            yield _Site(weights, _of_joined(product))
    joined = {id(layer) for product in products for layer in product.layers}
    for module in model.modules():
        if type(module) in _CLASSES and id(module) not in joined:
            weights = as_quantised(
                module["weight"],
                module["scales"],
                module.get("biases"),
                module.group_size,
                module.bits,
                module.mode,
            )
            if weights is not None:
                yield _Site(weights, _of_module(module))


def _of_joined(product: Any) -> Callable[[FewRowProduct], None]:
    def use(few_rows: FewRowProduct) -> None:
        product.multiply = few_rows

    return use


def _of_module(module: nn.Module) -> Callable[[FewRowProduct], None]:
    def use(few_rows: FewRowProduct) -> None:
        module.__class__ = _CLASSES[type(module)]
        module.few_row_product = few_rows

    return use

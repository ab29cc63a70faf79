"""Adapters of a loaded model: reads them and attaches them to its layers.

A row of a step has the number of an adapter, or none; see `adapted_layers.py` for what is computed.
A model without adapters is not changed at all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_unflatten
from mlx_lm.models.switch_layers import SwitchGLU, SwitchMLP

from mlxserve.core.errors import UnsupportedModel
from mlxserve.hub.adapter_files import AdapterFiles
from mlxserve.model.adapted_layers import (
    AdaptedEmbedding,
    AdaptedExperts,
    AdaptedLinear,
    AdaptedSwitchLinear,
    AdapterRows,
    RowAdapters,
)
from mlxserve.model.adapter_shares import (
    EMBEDDINGS,
    SWITCHES,
    Shares,
    is_summed,
    shares_of,
    sizes_of,
)
from mlxserve.model.paged import RowSelector, SelectedRowsHead
from mlxserve.model.rank_group import RankGroup, Split
from mlxserve.model.split_by_heads import NoHead
from mlxserve.model.split_by_layers import NoEmbedding, places_of
from mlxserve.request import Chunk

Matrices = tuple[mx.array, mx.array]  # lora_a and lora_b of a layer, as they are stored


@dataclass(frozen=True)
class Adapters:
    """The adapters of one model, by number."""

    names: tuple[str, ...]
    scales: tuple[float, ...]
    rows: AdapterRows

    def of_chunks(self, chunks: Sequence[Chunk]) -> RowAdapters | None:
        """Adapters of the rows of these chunks; None if no row has one."""
        numbers = [chunk.request.asked.adapter for chunk in chunks]
        if all(number is None for number in numbers):
            return None
        if len(set(numbers)) == 1:
            return self._of(numbers[:1])
        return self._of(
            [
                number
                for number, chunk in zip(numbers, chunks, strict=True)
                for _ in range(chunk.length)
            ]
        )

    def applied(self, model: nn.Module, number: int) -> AppliedAdapter:
        """Return the model with one adapter for all rows."""
        return AppliedAdapter(model, self.rows, self._of([number]), number)

    def _of(self, numbers: Sequence[int | None]) -> RowAdapters:
        index = np.array([number or 0 for number in numbers], np.int32)
        scale = [0.0 if number is None else self.scales[number] for number in numbers]
        return RowAdapters(mx.array(index), mx.array(scale, mx.float32)[:, None, None])


class AppliedAdapter:
    """A model with one adapter, for callers that pass whole texts."""

    def __init__(
        self, model: nn.Module, rows: AdapterRows, chosen: RowAdapters, number: int
    ) -> None:
        self.adapter_number = number
        self._model = model
        self._rows = rows
        self._chosen = chosen

    def __call__(self, *args: Any, **kwargs: Any) -> mx.array:
        with self._rows.choosing(self._chosen):
            logits: mx.array = self._model(*args, **kwargs)
        return logits

    def __getattr__(self, name: str) -> Any:
        """Forward attributes such as `make_cache` and `layers` to the model."""
        return getattr(self._model, name)


def attach(
    model: nn.Module,
    selector: RowSelector,
    name: str,
    adapters: Sequence[AdapterFiles],
    dtype: mx.Dtype,
    group: RankGroup | None = None,
) -> Adapters:
    """Attach adapters to the layers of a prepared `model` called `name`, and evaluate them.

    Of a `group` of ranks each has those of its own layers, or its share of all. They keep the dtype of their files, as
    mlx-lm computes them, but beside a float32 model they are float32. Raises UnsupportedModel for one that does not
    belong to this model.
    """
    rows = AdapterRows(selector)
    weights = [_read(adapter, is_float32=dtype == mx.float32) for adapter in adapters]
    modules = dict(model.named_modules())
    places, elsewhere = places_of(model)
    known = {path: modules[place] for path, place in places.items()} | elsewhere
    paths = list(dict.fromkeys(path for each in weights for path in each))
    shares = None
    if group is not None and group.split is Split.HEADS:
        shares = shares_of(model, group, name, paths)
    changed: dict[str, nn.Module] = {}
    for path in paths:
        pairs = [each.get(path) for each in weights]
        for adapter, pair in zip(adapters, pairs, strict=True):
            if pair is not None:
                _check(adapter.name, name, path, known, pair, shares)
        if path not in elsewhere and not _has_no_weights(known[path]):
            a, b = _stacked(pairs)
            if shares is not None and path in shares.of:
                a, b = shares.of[path].of(a, b)
            changed[path] = _adapted(known[path], a, b, selector, rows, group)
    experts = {path.rpartition(".")[0] for path in changed if isinstance(known[path], SWITCHES)}
    for path, module in changed.items():
        _put(model, places[path], module)
    for path in experts:
        _put(model, places[path], AdaptedExperts(known[path], rows))
    mx.eval(model.parameters())
    return Adapters(
        tuple(adapter.name for adapter in adapters),
        tuple(adapter.scale for adapter in adapters),
        rows,
    )


def _read(files: AdapterFiles, *, is_float32: bool) -> dict[str, Matrices]:
    """Read the matrices of each layer. Raises UnsupportedModel."""
    arrays = mx.load(str(files.weights))
    assert isinstance(arrays, dict)
    for tensor, array in arrays.items():
        if not mx.issubdtype(array.dtype, mx.floating):
            raise UnsupportedModel(
                f"The adapter {files.name}: {tensor[:100]} is in {array.dtype}, and not a floating-point "
                "matrix."
            )
        if is_float32:
            arrays[tensor] = array.astype(mx.float32)
    return {path: _laid_out(arrays, path) for path in files.layers}


def _laid_out(arrays: Mapping[str, mx.array], path: str) -> Matrices:
    """Return A as (..., input, rank) and B as (..., rank, output); the files transpose experts'."""
    a, b = arrays[f"{path}.lora_a"], arrays[f"{path}.lora_b"]
    return (a.swapaxes(-1, -2), b.swapaxes(-1, -2)) if a.ndim == 3 else (a, b)


def _check(
    adapter: str,
    name: str,
    path: str,
    modules: Mapping[str, nn.Module],
    pair: Matrices,
    shares: Shares | None,
) -> None:
    """Raises UnsupportedModel for matrices that do not fit this layer."""
    module = modules.get(path)
    layer = module.head if isinstance(module, SelectedRowsHead) else module
    if layer is not None and _has_no_weights(layer):
        return  # the rank that has them checks it
    sizes = sizes_of(layer) if shares is None else shares.sizes[path]
    if isinstance(layer, SWITCHES):
        parent = modules.get(path.rpartition(".")[0])
        sizes = sizes if isinstance(parent, (SwitchGLU, SwitchMLP)) else None
    if sizes is None:
        what = "no such layer" if layer is None else f"there it is a {type(layer).__name__}"
        raise UnsupportedModel(
            f"The adapter {adapter} changes {path[:100]}, which cannot be done in {name}: {what}. Serve it "
            "with the model that it was trained from."
        )
    a, b = pair
    if (*a.shape[:-1], b.shape[-1]) != sizes or a.shape[:-2] != b.shape[:-2]:
        raise UnsupportedModel(
            f"The adapter {adapter} was trained from another model than {name}: the sizes of {path[:100]} "
            f"are {(*a.shape[:-1], b.shape[-1])}, and not {sizes}."
        )


def _has_no_weights(layer: nn.Module) -> bool:
    """True for a head or an embedding that another rank has."""
    layer = layer.head if isinstance(layer, SelectedRowsHead) else layer
    return isinstance(layer, (NoHead, NoEmbedding))


def _stacked(pairs: Sequence[Matrices | None]) -> Matrices:
    """Stack the pairs, padded to the highest rank; None becomes zeros."""
    present = [pair for pair in pairs if pair is not None]
    rank = max(a.shape[-1] for a, _ in present)
    kinds = {array.dtype for pair in present for array in pair}
    dtype = kinds.pop() if len(kinds) == 1 else mx.float32
    a, b = present[0]
    nothing = (
        mx.zeros((*a.shape[:-1], rank), dtype),
        mx.zeros((*b.shape[:-2], rank, b.shape[-1]), dtype),
    )
    padded = [nothing if pair is None else _in_rank(pair, rank) for pair in pairs]
    join = mx.stack if a.ndim == 2 else mx.concatenate
    first, second = (join([pair[side].astype(dtype) for pair in padded]) for side in (0, 1))
    return first, second


def _in_rank(pair: Matrices, rank: int) -> Matrices:
    a, b = pair
    more = rank - a.shape[-1]
    before = [(0, 0)] * (a.ndim - 2)
    return mx.pad(a, [*before, (0, 0), (0, more)]), mx.pad(b, [*before, (0, more), (0, 0)])


def _adapted(
    layer: nn.Module,
    a: mx.array,
    b: mx.array,
    selector: RowSelector,
    rows: AdapterRows,
    group: RankGroup | None,
) -> nn.Module:
    """Return the layer with adapters."""
    has_head = group is None or group.is_lead
    if isinstance(layer, SelectedRowsHead):
        head = AdaptedLinear(layer.head, a, b, rows, is_head=True)
        return SelectedRowsHead(head, selector)
    if isinstance(layer, EMBEDDINGS):
        return AdaptedEmbedding(layer, a, b, rows, selector, has_head=has_head)
    if isinstance(layer, SWITCHES):
        return AdaptedSwitchLinear(layer, a, b, rows)
    summed_by = group.mx_group if group is not None and is_summed(layer) else None
    return AdaptedLinear(layer, a, b, rows, is_head=False, summed_by=summed_by)


def _put(model: nn.Module, path: str, module: nn.Module) -> None:
    model.update_modules(tree_unflatten([(path, module)]))

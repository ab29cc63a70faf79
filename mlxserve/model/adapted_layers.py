"""Layers with the matrices of several adapters beside their own weights, which stay as they are.

    rows of a step        x  (T, 1, input)          of adapters 0, 2, none, 2 ...
    the layer             y = layer(x)              one product for all rows
    its adapters          z = ((x A[i]) scale) B[i]     i and scale of each row; scale 0 for none
    the sum               y + z

A and B are stacked: (adapters, input, rank) and (adapters, rank, output), of experts (adapters * experts,
...). Ranks are padded to the highest with zeros, and an adapter that does not have a layer has zeros there.
A step without a row of an adapter calls the layer alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn

from mlxserve.model.paged import RowSelector


class RowAdapters(NamedTuple):
    """Adapter index and scale of N equally long runs of rows: of T rows, or of all as one."""

    number: mx.array  # (N,) int32
    scale: mx.array  # (N, 1, 1) float32; 0 for rows without an adapter


class AdapterRows:
    """The adapters of the current forward's rows, which the adapted layers read."""

    def __init__(self, selector: RowSelector) -> None:
        self.chosen: RowAdapters | None = None  # None if no row has one
        self._selector = selector
        self._all: RowAdapters | None = None
        self._experts: mx.array | None = None
        self._order: mx.array | None = None

    @contextmanager
    def choosing(self, chosen: RowAdapters | None) -> Iterator[None]:
        """Set the rows' adapters while the model is called."""
        self.chosen = self._all = chosen
        try:
            yield
        finally:
            self.chosen = self._all = None

    def narrow(self, rows: slice | mx.array) -> None:
        """Restrict to these rows until `widen`."""
        if self._all is not None and self._all.number.size > 1:
            number, scale = self._all
            self.chosen = RowAdapters(number[rows], scale[rows])

    def widen(self) -> None:
        self.chosen = self._all

    @property
    def of_head(self) -> RowAdapters | None:
        """Adapters of the rows that the head computes."""
        rows = self._selector.rows
        if self.chosen is None or rows is None or self.chosen.number.size == 1:
            return self.chosen
        return RowAdapters(self.chosen.number[rows], self.chosen.scale[rows])

    @contextmanager
    def routing(self, experts: mx.array) -> Iterator[None]:
        """Record each row's experts, (..., experts per row), while they are called."""
        self._experts, self._order = experts, None
        try:
            yield
        finally:
            self._experts = self._order = None

    def of_experts(self, experts: mx.array, *, is_sorted: bool) -> RowAdapters | None:
        """Index and scale of the row of each choice in `experts`; scale ends in (1, 1).

        is_sorted: they are the choices of `routing` in the order of mx.argsort, as mlx-lm sorts
            them
        """
        if self.chosen is None:
            return None
        number, scale = self.chosen
        num = number.size
        if is_sorted and num > 1:
            assert self._experts is not None, "experts are called by an AdaptedExperts"
            if self._order is None:
                rows = mx.argsort(self._experts.flatten()) // (self._experts.size // num)
                self._order = rows
            number, scale = number[self._order], scale[self._order]
            num = number.size
        shape = (num, *(1 for _ in experts.shape[1:]))
        return RowAdapters(number.reshape(shape), scale.reshape(*shape, 1, 1))


def low_rank(x: mx.array, a: mx.array, b: mx.array, chosen: RowAdapters) -> mx.array:
    """Return the adapters' contribution for `x`, (..., input): (..., output) in the dtype of x."""
    return _outer(_inner(x, a, chosen), b, chosen, x)


def _inner(x: mx.array, a: mx.array, chosen: RowAdapters) -> mx.array:
    """Return the scaled product of the rows with A: (N, rows, rank)."""
    number, scale = chosen
    return mx.gather_mm(x.reshape(number.size, -1, x.shape[-1]), a, rhs_indices=number) * scale


def _outer(z: mx.array, b: mx.array, chosen: RowAdapters, x: mx.array) -> mx.array:
    """Return its product with B in the shape of `x` but for the last dimension."""
    z = mx.gather_mm(z, b, rhs_indices=chosen.number)
    return z.astype(x.dtype).reshape(*x.shape[:-1], z.shape[-1])


class AdaptedLinear(nn.Module):  # type: ignore[misc]  # mlx's nn has no types
    """A Linear or QuantizedLinear with adapters."""

    def __init__(
        self,
        linear: nn.Module,
        a: mx.array,
        b: mx.array,
        rows: AdapterRows,
        *,
        is_head: bool,
        summed_by: mx.distributed.Group | None = None,
    ) -> None:
        """Wrap a layer.

        a: (adapters, input, rank), b: (adapters, rank, output)
        summed_by: the ranks that have its other inputs
        """
        super().__init__()
        self.linear = linear
        self._summed_by = summed_by
        self.lora_a = a
        self.lora_b = b
        self._rows = rows
        self._is_head = is_head

    def __call__(self, x: mx.array) -> mx.array:
        y: mx.array = self.linear(x)
        chosen = self._rows.of_head if self._is_head else self._rows.chosen
        if chosen is None:
            return y
        if self._summed_by is None:
            return y + low_rank(x, self.lora_a, self.lora_b, chosen)
        z = _inner(x, self.lora_a, chosen)
        # After the layer's own sum: the collectives of a step form one chain.
        z = mx.distributed.all_sum(mx.depends(z, y), group=self._summed_by)
        return y + _outer(z, self.lora_b, chosen, x)


class AdaptedEmbedding(nn.Module):  # type: ignore[misc]
    """An Embedding or QuantizedEmbedding with adapters, also as a tied head."""

    def __init__(
        self,
        embedding: nn.Module,
        a: mx.array,
        b: mx.array,
        rows: AdapterRows,
        selector: RowSelector,
        *,
        has_head: bool,
    ) -> None:
        """Wrap an embedding.

        a: (adapters, tokens, rank), b: (adapters, rank, size)
        has_head: False on a rank that computes no logits
        """
        super().__init__()
        self.embedding = embedding
        self.lora_a = a
        self.lora_b = b
        self._rows = rows
        self._selector = selector
        self._has_head = has_head

    def __call__(self, ids: mx.array) -> mx.array:
        y: mx.array = self.embedding(ids)
        if (chosen := self._rows.chosen) is None:
            return y
        number, scale = chosen
        in_rows = mx.maximum(ids.reshape(number.size, -1), 0)
        z = mx.gather_mm(
            self.lora_a[number[:, None], in_rows] * scale, self.lora_b, rhs_indices=number
        )
        z = z.astype(y.dtype).reshape(y.shape)
        # Rows of pictures are not of the embedding.
        return y + mx.where(ids[..., None] < 0, 0, z)

    def as_linear(self, hidden: mx.array) -> mx.array:
        """Compute the logits of the selected rows."""
        if not self._has_head:
            nothing: mx.array = self.embedding.as_linear(hidden)
            return nothing
        hidden = self._selector.select(hidden)
        # Not that of the object, which selects as well (`paged.select_rows`).
        y: mx.array = type(self.embedding).as_linear(self.embedding, hidden)
        if (chosen := self._rows.of_head) is None:
            return y
        b, a = self.lora_b.swapaxes(-1, -2), self.lora_a.swapaxes(-1, -2)
        return y + low_rank(hidden, b, a, chosen)


class AdaptedSwitchLinear(nn.Module):  # type: ignore[misc]
    """A SwitchLinear or QuantizedSwitchLinear with adapters: a matrix for each expert."""

    def __init__(self, linear: nn.Module, a: mx.array, b: mx.array, rows: AdapterRows) -> None:
        """Wrap a layer.

        a: (adapters * experts, input, rank), b: (adapters * experts, rank, output)
        """
        super().__init__()
        self.linear = linear
        self.lora_a = a
        self.lora_b = b
        self._rows = rows
        self._num_experts: int = linear.num_experts

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        y: mx.array = self.linear(x, indices, sorted_indices=sorted_indices)
        chosen = self._rows.of_experts(indices, is_sorted=sorted_indices)
        if chosen is None:
            return y
        which = chosen.number * self._num_experts + indices
        z = mx.gather_mm(x, self.lora_a, rhs_indices=which) * chosen.scale
        z = mx.gather_mm(z, self.lora_b, rhs_indices=which)
        return y + z.astype(x.dtype)


class AdaptedExperts(nn.Module):  # type: ignore[misc]
    """Experts with adapted matrices; records which experts the rows have chosen."""

    def __init__(self, experts: nn.Module, rows: AdapterRows) -> None:
        super().__init__()
        self.experts = experts
        self._rows = rows

    def __call__(self, x: mx.array, indices: mx.array) -> mx.array:
        with self._rows.routing(indices):
            y: mx.array = self.experts(x, indices)
        return y

"""LayerState: the cache of a recurrent layer in a step of rows, instead of ArraysCache.

Every token of a step is a row of the batch, which a recurrent layer must not take literally: the
rows of a chunk follow one another. So a module that is given a LayerState is called once for each
group of rows, with an ArraysCache that holds the group's state, and its outputs become rows again:

    rows of a step    | decodes (S rows) | chunk of A (L rows)          | chunk of B ...
    recurrent module  | (S, 1, hidden)   | (1, k, .), then (1, L - k, .) | (1, M, .)
    everything else   | (T, 1, hidden): one product for all rows, weights are read once

The rows of drafts are groups of one token of several sequences, which are not consecutive rows of the step.

A step of one chunk whose attention is fused needs none: the whole model is called with (1, T), as
mlx-lm does, and an ArraysCache for each layer (`GroupCaches`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlxserve.model.adapted_layers import AdapterRows
from mlxserve.model.state_groups import Group


@dataclass(frozen=True, slots=True)
class RecurrentRows:
    """State shared by the recurrent layers of a step."""

    groups: Sequence[Group]
    positions: mx.array  # (T,), as the attention layers of the step have them
    num_rows: int
    num_arrays: Sequence[int]  # arrays of each layer's state
    state_class: type  # the model's own ArraysCache
    adapters: AdapterRows | None = None  # adapters of the step's rows, if any
    # Of each row the index among the rows of all groups; None if they are in order.
    order: mx.array | None = None


class LayerState:
    """One recurrent layer's state for one step."""

    # `__dict__`: definitions of mlx-vlm keep notes of their own on a cache.
    __slots__ = ("__dict__", "_layer", "_step")
    # Of a padded batch; groups have no padding.
    lengths = None
    left_padding = None

    def __init__(self, step: RecurrentRows, layer: int) -> None:
        self._layer = layer
        self._step = step

    def make_mask(self, N: int, **_: Any) -> None:  # noqa: ARG002, N803
        """Return None: no row is padding."""
        return

    def advance(self, N: int) -> None:  # noqa: N803
        """Do nothing: only padded batches have lengths to advance."""

    def run(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a module once for each group, and return its outputs as rows.

        args: the module and its arguments
        """
        step, layer = self._step, self._layer
        num_groups, num_arrays = len(step.groups), step.num_arrays[layer]
        outputs = []
        changed: dict[int, mx.array | None] = {}  # results of this module for the previous group
        for group in step.groups:
            before = group.begin(layer, num_arrays)
            if group.previous is not None:
                # Several modules may share a layer's state (time mix and channel mix of RWKV): from group to
                # group each takes over only what it changed.
                if group.level:
                    changed = {at: _last(array, group.batch) for at, array in changed.items()}
                before = [changed.get(at, array) for at, array in enumerate(before)]
            inner = step.state_class(num_arrays)
            drafts = None if group.drafts is None else group.drafts.call(layer, before)
            inner.cache = list(before) if drafts is None else drafts.placeholders
            if step.adapters is not None:
                if group.index is None:
                    step.adapters.narrow(slice(group.first, group.end))
                else:
                    step.adapters.narrow(group.index)
            arguments = self._of_group(args, group, inner)
            named = kwargs and dict(
                zip(kwargs, self._of_group(kwargs.values(), group, inner), strict=True)
            )
            if drafts is None:
                output = call(*arguments, **named)
            else:
                output = drafts.run(call, arguments, named)
            outputs.append(output if group.length == 1 else _as_rows(output))
            group.after[layer] = inner.cache
            if num_groups > 1:
                changed = {
                    at: new
                    for at, (new, old) in enumerate(zip(inner.cache, before, strict=True))
                    if new is not old
                }
        if step.adapters is not None:
            step.adapters.widen()
        return outputs[0] if num_groups == 1 else _joined(outputs, step.order)

    def _of_group(self, values: Iterable[Any], group: Group, inner: Any) -> list[Any]:
        """Slice the module's arguments to the group."""
        return [
            self._rows_of(value, group)
            if type(value) is mx.array  # `isinstance` takes as long as an op's call for other types
            else (inner if value is self else value)
            for value in values
        ]

    def _rows_of(self, array: mx.array, group: Group) -> mx.array:
        """Slice an array of the step's rows, (T, 1, ...), to (batch, length, ...); keep others."""
        num_rows = self._step.num_rows
        if group.batch == num_rows:
            return array
        if array is self._step.positions:
            return mx.array(group.positions)
        if array.shape[:2] != (num_rows, 1):
            return array
        if group.index is not None:
            return array[group.index]
        if len(self._step.groups) > 1:
            array = array[group.first : group.end]
        return array if group.length == 1 else array.swapaxes(0, 1)


class GroupCaches:
    """A group's states as the model's own ArraysCaches, in layer order."""

    def __init__(self, group: Group, num_arrays: Sequence[int], state_class: type) -> None:
        self._group = group
        self._caches: list[Any] = [state_class(num) for num in num_arrays]
        for layer, (cache, num) in enumerate(zip(self._caches, num_arrays, strict=True)):
            cache.cache = list(group.begin(layer, num))

    def __getitem__(self, layer: int) -> Any:
        return self._caches[layer]

    def commit(self) -> None:
        """Store the states that the layers left in the caches."""
        self._group.after = [cache.cache for cache in self._caches]


def _as_rows(output: Any) -> Any:
    """Reshape a module's output for a chunk, (1, length, ...), to rows of the step."""
    if isinstance(output, mx.array):
        return output.swapaxes(0, 1)
    if isinstance(output, (tuple, list)):
        return type(output)(_as_rows(part) for part in output)
    return output


def _joined(outputs: list[Any], order: mx.array | None) -> Any:
    """Concatenate the rows of several groups, in the order of the step's rows."""
    first = outputs[0]
    if isinstance(first, (tuple, list)):
        parts = zip(*outputs, strict=True)
        return type(first)(_joined(list(part), order) for part in parts)
    if not isinstance(first, mx.array):
        return first
    rows = mx.concatenate(outputs)
    return rows if order is None else rows[order]


def _last(array: mx.array | None, count: int) -> mx.array | None:
    """Return the last `count` rows of a state."""
    return None if array is None else array[-count:]

"""LayerState: what a recurrent layer is given instead of mlx-lm's ArraysCache, in a step of rows.

Every token of a step is a row of the batch, which a recurrent layer must not take literally: the
rows of a chunk follow one another. So a module that is given a LayerState is called once for each
group of rows, with an ArraysCache that holds the group's state, and its outputs become rows again:

    rows of a step    | decodes (S rows) | chunk of A (L rows)          | chunk of B ...
    recurrent module  | (S, 1, hidden)   | (1, k, .), then (1, L - k, .) | (1, M, .)
    everything else   | (T, 1, hidden): one product for all rows, weights are read once
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlxserve.model.adapted_layers import AdapterRows
from mlxserve.model.states import Group


@dataclass(frozen=True, slots=True)
class RecurrentRows:
    """What the recurrent layers of a step have in common."""

    groups: Sequence[Group]
    positions: mx.array  # (T,), as the attention layers of the step have them
    num_rows: int
    state_class: type  # the model's own ArraysCache
    adapters: AdapterRows | None = None  # those of the step's rows, where the model has some


class LayerState:
    """One recurrent layer's state for one step."""

    __slots__ = ("_layer", "_num_arrays", "_step")
    # Of a padded batch; groups have no padding.
    lengths = None
    left_padding = None

    def __init__(self, layer: int, num_arrays: int, step: RecurrentRows) -> None:
        self._layer = layer
        self._num_arrays = num_arrays
        self._step = step

    def make_mask(self, N: int, **_: Any) -> None:  # noqa: ARG002
        """None: no row is padding."""
        return

    def advance(self, N: int) -> None:
        """Nothing: only padded batches have lengths to move on."""

    def run(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A module's call, once for each group; its outputs as rows.

        args: the module and what it is called with
        """
        step, layer = self._step, self._layer
        num_groups = len(step.groups)
        outputs = []
        changed: dict[int, mx.array | None] = {}  # what this module did to the group before
        for group in step.groups:
            before = group.begin(layer, self._num_arrays)
            if group.previous is not None:
                # Several modules may share a layer's state (time mix and channel mix of RWKV): from group to
                # group each takes over only what it changed.
                before = [changed.get(at, array) for at, array in enumerate(before)]
            inner = step.state_class(self._num_arrays)
            inner.cache = list(before)
            if step.adapters is not None:
                step.adapters.narrow(group.first, group.end)
            given = self._of_group(args, group, inner)
            named = kwargs and dict(
                zip(kwargs, self._of_group(kwargs.values(), group, inner), strict=True)
            )
            outputs.append(_as_rows(call(*given, **named), group))
            group.after[layer] = inner.cache
            if num_groups > 1:
                changed = {
                    at: new
                    for at, (new, old) in enumerate(zip(inner.cache, before, strict=True))
                    if new is not old
                }
        if step.adapters is not None:
            step.adapters.widen()
        return outputs[0] if num_groups == 1 else _joined(outputs)

    def _of_group(self, values: Iterable[Any], group: Group, inner: Any) -> list[Any]:
        """Arguments of the module as its group sees them."""
        return [
            self._rows_of(value, group)
            if isinstance(value, mx.array)
            else (inner if value is self else value)
            for value in values
        ]

    def _rows_of(self, array: mx.array, group: Group) -> mx.array:
        """(batch, length, ...) of an array of the step's rows, (T, 1, ...); others as they are."""
        num_rows = self._step.num_rows
        if group.batch == num_rows:
            return array
        if array is self._step.positions:
            return mx.array(group.positions)
        shape = array.shape
        if shape[:2] != (num_rows, 1):
            return array
        if group.length < num_rows:  # beside other groups
            array = array[group.first : group.end]
        return array.reshape((group.batch, group.length, *shape[2:]))


def _as_rows(output: Any, group: Group) -> Any:
    """A group's output as rows of the step, each of them if a module returns several."""
    if group.length == 1:
        return output
    if isinstance(output, mx.array):
        return output.reshape((group.batch * group.length, 1, *output.shape[2:]))
    if isinstance(output, (tuple, list)):
        return type(output)(_as_rows(part, group) for part in output)
    return output


def _joined(outputs: list[Any]) -> Any:
    """The rows of several groups."""
    first = outputs[0]
    if isinstance(first, (tuple, list)):
        return type(first)(_joined(list(parts)) for parts in zip(*outputs, strict=True))
    return mx.concatenate(outputs) if isinstance(first, mx.array) else first

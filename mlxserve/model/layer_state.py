"""LayerState: what a recurrent layer is given instead of mlx-lm's ArraysCache, in a step of rows.

Every token of a step is a row of the batch, which a recurrent layer must not take literally: the
rows of a chunk follow one another. So a module that is given a LayerState is called once for each
group of rows, with an ArraysCache that holds the group's state, and its outputs become rows again:

    rows of a step    | decodes (S rows) | chunk of A (L rows)          | chunk of B ...
    recurrent module  | (S, 1, hidden)   | (1, k, .), then (1, L - k, .) | (1, M, .)
    everything else   | (T, 1, hidden): one product for all rows, weights are read once
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from mlxserve.model.adapted_layers import AdapterRows
from mlxserve.model.states import Arrays, Group


class LayerState:
    """One recurrent layer's state for one step."""

    __slots__ = (
        *("_adapters", "_class", "_groups", "_layer", "_num_arrays"),
        *("_num_rows", "_positions"),
    )
    # Of a padded batch; groups have no padding.
    lengths = None
    left_padding = None

    def __init__(
        self,
        layer: int,
        num_arrays: int,
        groups: Sequence[Group],
        positions: mx.array,
        state_class: type,
        adapters: AdapterRows | None = None,
    ) -> None:
        """positions: (T,), as the attention layers of the step have them
        state_class: the model's own ArraysCache
        adapters: those of the step's rows, where the model has some
        """
        self._adapters = adapters
        self._layer = layer
        self._class = state_class
        self._num_arrays = num_arrays
        self._groups = groups
        self._positions = positions
        self._num_rows = len(positions)

    def make_mask(self, N: int, **_: Any) -> None:  # noqa: ARG002
        """None: no row is padding."""
        return

    def advance(self, N: int) -> None:
        """Nothing: only padded batches have lengths to move on."""

    def run(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A module's call, once for each group; its outputs as rows."""
        outputs = []
        changed: dict[int, mx.array | None] = {}  # what this module did to the group before
        num_groups = len(self._groups)
        for group in self._groups:
            before = self._before(group, changed)
            inner = self._class(self._num_arrays)
            inner.cache = list(before)
            if self._adapters is not None:
                self._adapters.narrow(group.first, group.end)
            of_group = [self._of_group(value, group, inner) for value in args]
            named = kwargs and {k: self._of_group(v, group, inner) for k, v in kwargs.items()}
            outputs.append(_as_rows(call(*of_group, **named), group))
            group.after[self._layer] = inner.cache
            if num_groups > 1:
                changed = {
                    at: new
                    for at, (new, old) in enumerate(zip(inner.cache, before, strict=True))
                    if new is not old
                }
        if self._adapters is not None:
            self._adapters.widen()
        return outputs[0] if num_groups == 1 else _joined(outputs)

    def _before(self, group: Group, changed: dict[int, mx.array | None]) -> Arrays:
        """The arrays that a group begins with.

        Several modules may share a layer's state (time mix and channel mix of RWKV): the second
        begins with what the first left, and from group to group takes over only what it changed.
        """
        arrays = group.after[self._layer] or group.begin(self._layer, self._num_arrays)
        if group.previous is None:
            return arrays
        return [changed.get(at, array) for at, array in enumerate(arrays)]

    def _of_group(self, value: Any, group: Group, inner: Any) -> Any:
        """An argument of the module as its group sees it."""
        if value is self:
            return inner
        if not isinstance(value, mx.array):
            return value
        num_rows = self._num_rows
        if group.batch == num_rows:
            return value
        if value is self._positions:
            return mx.array(group.positions)
        shape = value.shape
        if shape[:2] != (num_rows, 1):
            return value
        if group.length < num_rows:  # beside other groups
            value = value[group.first : group.end]
        return value.reshape(group.batch, group.length, *shape[2:])


def _as_rows(output: Any, group: Group) -> Any:
    """A group's output as rows of the step, each of them if a module returns several."""
    if group.length == 1:
        return output
    if isinstance(output, mx.array):
        return output.reshape(group.batch * group.length, 1, *output.shape[2:])
    if isinstance(output, (tuple, list)):
        return type(output)(_as_rows(part, group) for part in output)
    return output


def _joined(outputs: list[Any]) -> Any:
    """The rows of several groups."""
    first = outputs[0]
    if isinstance(first, (tuple, list)):
        return type(first)(_joined(list(parts)) for parts in zip(*outputs, strict=True))
    return mx.concatenate(outputs) if isinstance(first, mx.array) else first

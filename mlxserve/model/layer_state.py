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
            outputs.append(call(*of_group, **named))
            group.after[self._layer] = inner.cache
            if num_groups > 1:
                changed = {
                    at: new
                    for at, (new, old) in enumerate(zip(inner.cache, before, strict=True))
                    if new is not old
                }
        if self._adapters is not None:
            self._adapters.widen()
        return _as_rows(outputs, self._groups)

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
        if not isinstance(value, mx.array):
            return inner if value is self else value
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


def _as_rows(outputs: list[Any], groups: Sequence[Group]) -> Any:
    """Outputs of the groups joined, piece by piece if a module returns several."""
    first = outputs[0]
    if isinstance(first, (tuple, list)):
        return type(first)(_as_rows(list(parts), groups) for parts in zip(*outputs, strict=True))
    if not isinstance(first, mx.array):
        return first
    rows = [
        output.reshape(group.batch * group.length, 1, *output.shape[2:])
        if group.length > 1
        else output
        for output, group in zip(outputs, groups, strict=True)
    ]
    return rows[0] if len(rows) == 1 else mx.concatenate(rows)

"""DraftRows: all rows of a step's drafts in one call of each recurrent module.

A definition of mlx-lm calls its module with (batch, length), where the rows of a batch know nothing of each
other. Here every row of a draft is a row of the batch, so that projections and norms are computed once for all
of them, and what one row takes from the row before is put in where the module asks for it:

    its convolution     is given the inputs of the rows before each row
    its recurrence      runs the rows of each sequence one after the other (`metal_kernels/replay.py`)

    rows of a step   | a0 | b0 b1 b2 b3 | c0 c1 |      (7, 1, hidden)
    states before      a    b             c            (3, ...)

After the step the inputs of each row's convolution are there, and of the recurrence the state before, with the
rows' inputs: the next step computes the state after the accepted ones. Modules are not known by their names: a model
is taken if a trial finds all of its states computed in these ways, with the same logits (`replay_choice.py`).
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial, wraps
from itertools import accumulate
from types import ModuleType
from typing import Any, TypeAlias

import mlx.core as mx
import mlx.nn as nn

from metal_kernels.replay import DeltaRows, Readout, ReplayOps, Rows, Spans, SsmRows
from mlxserve.model.packed_states import Stack
from mlxserve.model.paged import defining_modules

_MARK = "_mlxserve_draft_rows"
_UPDATES = ("gated_delta_update", "ssm_update")  # what definitions call
# (arguments of a single row, its state) -> (its output, the state after it)
RowAlone: TypeAlias = Callable[[slice, mx.array], tuple[mx.array, mx.array]]


class NotReplayed(ValueError):
    """A module keeps a state that is computed in another way."""


@dataclass(frozen=True, slots=True)
class HeldRows:
    """The state of a recurrence before rows of drafts, and their inputs."""

    ops: ReplayOps
    rows: Rows
    state: mx.array

    def after(self, spans: Spans) -> mx.array:
        """Return the states after the rows of each span."""
        return self.ops.states(self.rows, self.state, spans)

    def arrays(self) -> list[mx.array]:
        return [self.state, *(value for value in vars(self.rows).values())]


After: TypeAlias = "mx.array | HeldRows"  # after each row: (rows, ...), or what it is computed from


@dataclass(eq=False)
class DraftRows:
    """The rows of decodes with drafts and without, and the states after each of them.

    ops      computes recurrences
    lengths  of each sequence: its number of rows, which follow those of the sequence before
    after    by layer: its arrays
    """

    ops: ReplayOps
    lengths: Sequence[int]
    after: dict[int, list[After]] = field(default_factory=dict)
    _windows: dict[int, mx.array] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.firsts = [0, *accumulate(self.lengths)][:-1]
        self.num_rows = sum(self.lengths)
        self.spans = Spans(
            [
                (at, first, length)
                for at, (first, length) in enumerate(zip(self.firsts, self.lengths, strict=True))
            ]
        )
        self._sequences = [at for at, length in enumerate(self.lengths) for _ in range(length)]

    def call(self, layer: int, before: Sequence[mx.array | None]) -> ModuleCall:
        """Begin a call of the module of a layer. `before`: (sequences, ...) each."""
        call = ModuleCall(self, before)
        self.after[layer] = call.after
        return call

    def at(self, rows: Sequence[int]) -> Stack:
        """Return the states after these rows, a stack in their order. Not evaluated."""
        of_rows = [self._sequences[row] for row in rows]
        spans = Spans(
            [
                (sequence, self.firsts[sequence], row - self.firsts[sequence] + 1)
                for row, sequence in zip(rows, of_rows, strict=True)
            ]
        )
        index = mx.array(list(rows))
        return [
            [each.after(spans) if isinstance(each, HeldRows) else each[index] for each in arrays]
            for _, arrays in sorted(self.after.items())
        ]

    def arrays(self) -> list[mx.array]:
        """Arrays to evaluate with the step."""
        return [
            array
            for arrays in self.after.values()
            for each in arrays
            for array in (each.arrays() if isinstance(each, HeldRows) else [each])
        ]

    def windows(self, kept: int) -> mx.array:
        """Return the inputs that each row's convolution sees: (rows, kept + 1) indices.

        They are those of the `kept` inputs of each sequence before its first row, and then of all rows.
        """
        index = self._windows.get(kept)
        if index is None:
            index = self._windows[kept] = mx.array(self._inputs_seen(kept))
        return index

    def _inputs_seen(self, kept: int) -> list[list[int]]:
        seen = []
        for sequence, (first, length) in enumerate(zip(self.firsts, self.lengths, strict=True)):
            inputs = [sequence * kept + at for at in range(kept)]
            inputs += [len(self.lengths) * kept + first + at for at in range(length)]
            seen += [inputs[at : at + kept + 1] for at in range(length)]
        return seen


class ModuleCall:
    """One call of a module for the rows of drafts.

    placeholders   what its cache holds meanwhile
    """

    def __init__(self, drafts: DraftRows, before: Sequence[mx.array | None]) -> None:
        self._drafts = drafts
        self._before = before
        self._left = list(range(len(before)))  # arrays that nothing has computed yet
        self.after: list[Any] = [None] * len(before)
        self.placeholders = [self._placeholder(array) for array in before]

    def _placeholder(self, array: mx.array | None) -> mx.array | None:
        """Return a state of the shape that the module expects; that of a recurrence as it is."""
        if array is None or array.ndim > 3:
            return array
        return mx.broadcast_to(array[:1], (self._drafts.num_rows, *array.shape[1:]))

    def run(self, call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call the module. Raises NotReplayed if it has a state that was computed in another way."""
        _active.call = self
        try:
            output = call(*args, **kwargs)
        finally:
            _active.call = None
        if self._left:
            raise NotReplayed(f"{len(self._left)} of {len(self.after)} states are no draft's")
        return output

    def inputs_of_rows(self, given: mx.array) -> mx.array:
        """Return what a convolution sees: (rows, width, channels).

        given: the same, but with placeholders before the last of the width
        """
        kept, channels = given.shape[1] - 1, given.shape[2]
        at = self._take(lambda array: array.shape[1:] == (kept, channels))
        state = self._before[at]
        assert state is not None
        inputs = mx.concatenate([state.reshape(-1, channels), given[:, -1]])
        windows = inputs[self._drafts.windows(kept)]
        self.after[at] = windows[:, 1:]
        return windows

    def outputs_of_rows(
        self, placeholder: mx.array, rows: Rows, readout: Readout, alone: RowAlone
    ) -> mx.array:
        """Return the outputs of a recurrence: (rows, 1, heads, dim).

        placeholder: the state that the module passed on
        alone: the definition's own recurrence of one row, for a comparison
        """
        at = self._take(lambda array: array is placeholder)
        held = HeldRows(self._drafts.ops, rows, placeholder)
        self.after[at] = held
        outputs = self._drafts.ops.outputs(rows, readout, placeholder, self._drafts.spans)
        if _active.compared is not None:
            _active.compared += self._compare(outputs, held, alone)
        return outputs[:, None]

    def _compare(self, outputs: mx.array, held: HeldRows, alone: RowAlone) -> Iterator[mx.array]:
        """Yield whether each row has the bits that the definition computes for it alone."""
        for sequence, first, count in self._drafts.spans.table:
            state = held.state[sequence : sequence + 1]
            for row in range(first, first + count):
                output, state = alone(slice(row, row + 1), state)
                yield _same_bits(output.reshape(outputs[row].shape), outputs[row])
                after = held.after(Spans([(sequence, first, row - first + 1)]))
                yield _same_bits(state, after)

    def _take(self, is_wanted: Callable[[mx.array], bool]) -> int:
        """Return the first array of the cache that is left and wanted. Raises NotReplayed."""
        for at in self._left:
            array = self._before[at]
            if array is not None and is_wanted(array):
                self._left.remove(at)
                return at
        raise NotReplayed("a state has another shape than the module's cache")


class _Active(threading.local):
    """Holds what this thread's modules are called for."""

    call: ModuleCall | None = None
    compared: list[mx.array] | None = None


_active = _Active()


@contextmanager
def comparing() -> Iterator[list[mx.array]]:
    """Collect whether rows of drafts have the bits of single rows, while a model is called."""
    compared: list[mx.array] = []
    _active.compared = compared
    try:
        yield compared
    finally:
        _active.compared = None


class DraftConv1d(nn.Conv1d):  # type: ignore[misc]  # mlx's nn has no types
    """A depthwise convolution, which sees the rows before each row of a draft."""

    def __call__(self, x: mx.array) -> mx.array:
        call = _active.call
        output: mx.array = super().__call__(x if call is None else call.inputs_of_rows(x))
        return output


def use_draft_rows(model: nn.Module) -> None:
    """Let the convolutions and recurrences of a model compute rows of drafts. Idempotent."""
    for module in model.modules():
        if type(module) is nn.Conv1d and module.weight.shape[-1] == 1:
            module.__class__ = DraftConv1d
    for definition in defining_modules(model):
        for update in _UPDATES:
            if (function := getattr(definition, update, None)) is not None:
                _use_in(sys.modules[function.__module__])


def _use_in(owner: ModuleType) -> None:
    """Replace the functions of a module of mlx-lm that run a recurrence."""
    for name, rows_of in _RECURRENCES.items():
        plain = getattr(owner, name, None)
        if plain is not None and not hasattr(plain, _MARK):
            setattr(owner, name, _with_drafts(plain, partial(rows_of, owner)))


def _with_drafts(
    plain: Callable[..., Any],
    rows_of: Callable[..., tuple[Rows, Readout, mx.array, Callable[..., Any]]],
) -> Callable[..., Any]:
    @wraps(plain)
    def run(*args: Any, **kwargs: Any) -> Any:
        call = _active.call
        if call is None:
            return plain(*args, **kwargs)
        rows, readout, state, of_row = rows_of(*args, **kwargs)

        def alone(row: slice, before: mx.array) -> tuple[mx.array, mx.array]:
            output, after = plain(*of_row(row, before))
            return output, after

        return call.outputs_of_rows(state, rows, readout, alone), state

    setattr(run, _MARK, True)
    return run


def _delta(
    _owner: ModuleType,
    q: mx.array,
    k: mx.array,
    v: mx.array,
    g: mx.array,
    beta: mx.array,
    state: mx.array,
    mask: mx.array | None = None,
) -> tuple[Rows, Readout, mx.array, Callable[..., Any]]:
    """Read the arguments of mlx-lm's `gated_delta_kernel` and `gated_delta_ops`: (T, 1, ...)."""
    if mask is not None:
        raise NotReplayed("a gated delta net with a mask")
    arrays = q, k, v, g, beta
    queries, *inputs = (array.squeeze(1) for array in arrays)

    def of_row(row: slice, before: mx.array) -> tuple[mx.array, ...]:
        return *(array[row] for array in arrays), before

    return DeltaRows(*inputs), (queries,), state, of_row


def _ssm(
    owner: ModuleType,
    x: mx.array,
    A_log: mx.array,  # noqa: N803
    B: mx.array,  # noqa: N803
    C: mx.array,  # noqa: N803
    D: mx.array,  # noqa: N803
    dt: mx.array,
    dt_bias: mx.array,
    state: mx.array,
    limits: tuple[float, float],
    mask: mx.array | None = None,
    lengths: mx.array | None = None,
) -> tuple[Rows, Readout, mx.array, Callable[..., Any]]:
    """Read the arguments of mlx-lm's `ssm_update_kernel` and `ssm_attn`: (T, 1, ...)."""
    if mask is not None or lengths is not None:
        raise NotReplayed("a state-space layer with a mask")
    steps = owner.compute_dt(dt, dt_bias, limits)

    def of_row(row: slice, before: mx.array) -> tuple[Any, ...]:
        return x[row], A_log, B[row], C[row], D, dt[row], dt_bias, before, limits

    rows = SsmRows(x.squeeze(1), steps.squeeze(1), A_log, B.squeeze(1))
    return rows, (C.squeeze(1), D), state, of_row


_RECURRENCES: dict[str, Callable[..., Any]] = {
    "gated_delta_kernel": _delta,
    "gated_delta_ops": _delta,
    "ssm_update_kernel": _ssm,
    "ssm_attn": _ssm,
}


def _same_bits(first: mx.array, second: mx.array) -> mx.array:
    """Compare two arrays, lazily; of other dtypes they are others."""
    if first.dtype != second.dtype:
        return mx.array(False)
    bits = {4: mx.uint32, 2: mx.uint16}[first.dtype.size]
    return mx.array_equal(first.view(bits), second.view(bits))

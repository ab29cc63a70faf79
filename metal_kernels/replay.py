"""Rows of drafts through recurrent layers: one call for all of them, and one state kept for each sequence.

How many rows of a draft are right is known only after its step. So a layer computes the outputs of all
rows from the state before them, and keeps that state with the inputs of the rows. The step after it
replays the accepted rows: it computes the state after them once more, with the same bits.

    step n        state s, rows a b c d  ->  their outputs; s and the inputs of a b c d are kept
                  a and b are accepted
    step n + 1    s, a b  ->  the state after b, with which it begins

The states after each row, kept instead, would be 150 MB each for a hybrid of 27B.

    DeltaRows   the gated delta rule, with one gate for each head (Qwen3-Next, Qwen3.5) or for each number
                of its keys (Kimi Linear)
    SsmRows     the state-space layer of Mamba 2 (Nemotron-H, Falcon-H1, Granite 4 H)

`PlainReplay` is the specification, `Replay` the kernels.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Protocol, TypeAlias

import mlx.core as mx
import numpy as np

from metal_kernels.kernels import (
    REPLAY_DELTA,
    REPLAY_SSM,
    SMALLEST_INPUT,
    Dispatch,
    Kernels,
    KernelSpec,
    Template,
)
from metal_kernels.ops import FLOATS
from metal_kernels.plans import upload

_LANES = 32
# Numbers of a state that a lane holds, at most: more would leave registers.
_MAX_NUMBERS = 8
Readout: TypeAlias = tuple[mx.array, ...]  # what outputs are read from a state with


@dataclass(frozen=True)
class Spans:
    """The rows that follow each state.

    table: (sequence, 3): the index of a state, its first row, and the number of its rows, which may be 0
    """

    table: Sequence[tuple[int, int, int]]

    @cached_property
    def uploaded(self) -> mx.array:
        """Return the table for a kernel."""
        return upload(np.array(self.table, np.int32).reshape(-1, 3))

    @property
    def num_rows(self) -> int:
        """Number of rows of all spans."""
        return sum(count for _, _, count in self.table)

    def __len__(self) -> int:
        return len(self.table)


@dataclass(frozen=True, eq=False)
class DeltaRows:
    """T rows of a gated delta net, without their queries.

    k     (T, key heads, key dim)
    v     (T, value heads, value dim)
    g     (T, value heads) float32, or (T, value heads, key dim)
    beta  (T, value heads)
    """

    k: mx.array
    v: mx.array
    g: mx.array
    beta: mx.array

    spec = REPLAY_DELTA
    simdgroups = 4  # of a threadgroup: as mlx-lm's

    @property
    def sizes(self) -> Template:
        """Return the constants of the kernel."""
        (_, key_heads, key_dim), (_, heads, value_dim) = self.k.shape, self.v.shape
        return [
            ("HK", key_heads),
            ("HV", heads),
            ("DK", key_dim),
            ("DV", value_dim),
            ("GATES", int(self.g.ndim == 3)),
        ]

    @property
    def outputs(self) -> tuple[tuple[int, ...], mx.Dtype]:
        """Return the shape and dtype of the rows' outputs."""
        return self.v.shape, self.k.dtype

    def readout(self, arrays: Readout) -> dict[str, mx.array]:
        """Name what outputs are read with: queries (T, key heads, key dim); keys if there are none."""
        return {"q": arrays[0] if arrays else self.k}

    def step(self, row: int, state: mx.array, arrays: Readout) -> tuple[mx.array, mx.array | None]:
        """Return the state after a row, in float32, and its output if there are queries.

        state: (value heads, value dim, key dim)
        """
        each = self.v.shape[1] // self.k.shape[1]
        key = mx.repeat(_floats(self.k[row]), each, 0)[:, None]
        gate = _floats(self.g[row])
        state = state * (gate[:, None, None] if gate.ndim == 1 else gate[:, None])
        held = (state * key).sum(-1)
        delta = (_floats(self.v[row]) - held) * _floats(self.beta[row])[:, None]
        state = state + key * delta[..., None]
        if not arrays:
            return state, None
        query = mx.repeat(_floats(arrays[0][row]), each, 0)[:, None]
        return state, (state * query).sum(-1)


@dataclass(frozen=True, eq=False)
class SsmRows:
    """T rows of a state-space layer, without what their outputs are read with.

    x      (T, heads, dim)
    dt     (T, heads) float32: lengths of the time steps
    A_log  (heads,)
    B      (T, groups, state size)
    """

    x: mx.array
    dt: mx.array
    A_log: mx.array
    B: mx.array

    spec = REPLAY_SSM
    simdgroups = 8

    @property
    def sizes(self) -> Template:
        """Return the constants of the kernel."""
        (_, heads, dim), (_, groups, state) = self.x.shape, self.B.shape
        return [("HEADS", heads), ("GROUPS", groups), ("DIM", dim), ("STATE", state)]

    @property
    def outputs(self) -> tuple[tuple[int, ...], mx.Dtype]:
        """Return the shape and dtype of the rows' outputs."""
        return self.x.shape, self.x.dtype

    def readout(self, arrays: Readout) -> dict[str, mx.array]:
        """Name what outputs are read with: C, of B's shape, and D (heads,); any if there are none."""
        names = arrays or (self.B, self.A_log)
        return {"C": names[0], "D": names[1]}

    def step(self, row: int, state: mx.array, arrays: Readout) -> tuple[mx.array, mx.array | None]:
        """Return the state after a row, in float32, and its output if there are C and D.

        state: (heads, dim, state size)
        """
        each = self.x.shape[1] // self.B.shape[1]
        dt = _floats(self.dt[row])
        kept = mx.exp(-mx.exp(_floats(self.A_log)) * dt)[:, None, None]
        x = _floats(self.x[row])
        added = (x * dt[:, None])[..., None] * mx.repeat(_floats(self.B[row]), each, 0)[:, None]
        state = kept * state + added
        if not arrays:
            return state, None
        read = mx.repeat(_floats(arrays[0][row]), each, 0)[:, None]
        return state, (state * read).sum(-1) + x * _floats(arrays[1])[:, None]


Rows: TypeAlias = DeltaRows | SsmRows


class ReplayOps(Protocol):
    """Computes rows of drafts."""

    def outputs(self, rows: Rows, readout: Readout, state: mx.array, spans: Spans) -> mx.array:
        """Return the outputs of all T rows, each of which is in one span: (T, heads, dim).

        state: (batch, heads, dim, state size)
        """

    def states(self, rows: Rows, state: mx.array, spans: Spans) -> mx.array:
        """Return the states after the rows of each span: (spans, heads, dim, state size)."""


class PlainReplay:
    """The specification: one row after the other in plain mlx."""

    def outputs(self, rows: Rows, readout: Readout, state: mx.array, spans: Spans) -> mx.array:
        shape, dtype = rows.outputs
        outputs: dict[int, mx.array] = {}
        for index, first, count in spans.table:
            held = state[index]
            for row in range(first, first + count):
                after, output = rows.step(row, _floats(held), readout)
                assert output is not None
                held, outputs[row] = after.astype(state.dtype), output
        return mx.stack([outputs[row] for row in range(shape[0])]).astype(dtype)

    def states(self, rows: Rows, state: mx.array, spans: Spans) -> mx.array:
        after = []
        for index, first, count in spans.table:
            held = state[index]
            for row in range(first, first + count):
                held = rows.step(row, _floats(held), ())[0].astype(state.dtype)
            after.append(held)
        return mx.stack(after)


class Replay:
    """The kernels, with their dispatches by shape. Raises ValueError for what `refusal` refuses."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self._dispatches: dict[Hashable, Dispatch] = {}

    def outputs(self, rows: Rows, readout: Readout, state: mx.array, spans: Spans) -> mx.array:
        return self._run(rows, readout, state, spans, *rows.outputs)

    def states(self, rows: Rows, state: mx.array, spans: Spans) -> mx.array:
        shape = len(spans), *state.shape[1:]
        return self._run(rows, (), state, spans, shape, state.dtype)

    def _run(
        self,
        rows: Rows,
        readout: Readout,
        state: mx.array,
        spans: Spans,
        shape: tuple[int, ...],
        dtype: mx.Dtype,
    ) -> mx.array:
        inputs = {each.name: getattr(rows, each.name) for each in fields(rows)}
        inputs |= rows.readout(readout)
        arrays = [(each.shape, each.dtype) for each in inputs.values()]
        key = (rows.spec.name, bool(readout), *arrays, state.shape, state.dtype, len(spans))
        dispatch = self._dispatches.get(key)
        if dispatch is None:
            if (reason := refusal(rows, state)) is not None:
                raise ValueError(reason)
            dispatch = self._dispatch(rows, bool(readout), state, len(spans), (shape, dtype))
            self._dispatches[key] = dispatch
        padded = {name: _padded(array) for name, array in inputs.items()}
        (out,) = dispatch(**padded, state=state, spans=spans.uploaded)
        return out

    def _dispatch(
        self,
        rows: Rows,
        reads: bool,
        state: mx.array,
        num_spans: int,
        out: tuple[tuple[int, ...], mx.Dtype],
    ) -> Dispatch:
        _, heads, dim, _ = state.shape
        spec: KernelSpec = rows.spec
        template = [("S", state.dtype), ("T", out[1]), *rows.sizes, ("KEEPS", int(not reads))]
        grid = _LANES, dim, num_spans * heads
        return self._kernels.dispatch(
            spec, {}, {"out": out}, template, grid, (_LANES, rows.simdgroups, 1)
        )


def refusal(rows: Rows, state: mx.array) -> str | None:
    """Return why `Replay` does not take these rows; None if it does."""
    numbers = state.shape[-1]
    if numbers % _LANES or numbers > _LANES * _MAX_NUMBERS:
        return f"states of {numbers} numbers for each value"
    others = {each.dtype for each in (state, *(getattr(rows, each.name) for each in fields(rows)))}
    if strange := [str(dtype) for dtype in others if dtype not in FLOATS]:
        return f"rows or states in {', '.join(sorted(strange))}"
    return None


def _padded(array: mx.array) -> mx.array:
    """Return an input that has SMALLEST_INPUT elements at least: few heads of a small model have fewer."""
    missing = -(-(SMALLEST_INPUT - array.size) // max(1, array[:1].size))
    if missing <= 0:
        return array
    return mx.concatenate([array, mx.zeros((missing, *array.shape[1:]), array.dtype)])


def _floats(array: mx.array) -> mx.array:
    return array.astype(mx.float32)

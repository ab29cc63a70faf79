"""Rows of drafts together equal mlx-lm's recurrence of each row alone, bit by bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from metal_kernels.kernels import Kernel, Kernels, KernelSpec
from metal_kernels.metal import MetalBackend
from metal_kernels.reading import read
from metal_kernels.replay import (
    DeltaRows,
    PlainReplay,
    Readout,
    Replay,
    Rows,
    Spans,
    SsmRows,
    refusal,
)
from tests.emulated import emulated_factory
from tests.emulator import MetalKernel
from tests.metal_kernels.mlx_recurrences import row_alone

SLOW = pytest.mark.slow
NUM_ROWS = 6
# Decodes without a draft between drafts of three and one tokens; states in another order.
ALL_ROWS = Spans([(2, 0, 1), (0, 1, 4), (1, 5, 1)])
# Of the draft of three tokens all, none and one are right; a state that no row follows.
ACCEPTED = Spans([(0, 1, 4), (0, 1, 1), (0, 1, 2), (1, 5, 1), (2, 0, 0)])

Case = tuple[Rows, Readout, mx.array]  # rows, what their outputs are read with, states


def drawn(shape: tuple[int, ...], dtype: mx.Dtype, seed: int, scale: float = 1.0) -> mx.array:
    return (scale * mx.random.normal(shape, key=mx.random.key(seed))).astype(dtype)


def delta_case(
    dtype: mx.Dtype,
    key_dim: int = 64,
    value_dim: int = 8,
    *,
    has_gates: bool = False,
    state_dtype: mx.Dtype = mx.float32,
    num_rows: int = NUM_ROWS,
) -> Case:
    """Two value heads for each of keys."""
    heads, key_heads = 4, 2
    scale = key_dim**-0.5
    keys = num_rows, key_heads, key_dim
    gates = (num_rows, heads, key_dim) if has_gates else (num_rows, heads)
    rows = DeltaRows(
        drawn(keys, dtype, 1, scale),
        drawn((num_rows, heads, value_dim), dtype, 2),
        mx.sigmoid(drawn(gates, mx.float32, 3)),
        mx.sigmoid(drawn((num_rows, heads), dtype, 4)),
    )
    states = drawn((3, heads, value_dim, key_dim), state_dtype, 6)
    return rows, (drawn(keys, dtype, 5, scale),), states


def ssm_case(
    dtype: mx.Dtype,
    state_dtype: mx.Dtype = mx.float32,
    state: int = 64,
    num_rows: int = NUM_ROWS,
) -> Case:
    """Two heads for each group."""
    heads, dim, groups = 4, 6, 2
    inputs = num_rows, groups, state
    rows = SsmRows(
        drawn((num_rows, heads, dim), dtype, 1),
        mx.sigmoid(drawn((num_rows, heads), mx.float32, 2)),
        drawn((heads,), mx.float32, 3),
        drawn(inputs, dtype, 4),
    )
    states = drawn((3, heads, dim, state), state_dtype, 6)
    return rows, (drawn(inputs, dtype, 5), drawn((heads,), dtype, 7)), states


def cases(dtype: mx.Dtype) -> dict[str, Case]:
    """The `stored` ones have states in 16 bits."""
    stored = mx.float16 if dtype == mx.float16 else mx.bfloat16
    return {
        "delta": delta_case(dtype),
        "gates": delta_case(dtype, value_dim=6, has_gates=True),
        "packed": delta_case(dtype, 128),  # for these mlx-lm has a kernel of its own
        "packed gates": delta_case(dtype, 128, has_gates=True),
        "not packed": delta_case(dtype, 128, 6),
        "stored": delta_case(dtype, 128, state_dtype=stored),
        "ssm": ssm_case(dtype),
        "stored ssm": ssm_case(dtype, stored, 32),
    }


NAMES = list(cases(mx.float32))


def each_of(names: Sequence[str], plain: Sequence[str]) -> list[Any]:
    """All but the plain ones are slow."""
    return [name if name in plain else pytest.param(name, marks=SLOW) for name in names]


def same_bits(first: mx.array, second: mx.array) -> bool:
    assert first.dtype == second.dtype
    bits = mx.uint32 if first.dtype == mx.float32 else mx.uint16
    return bool(read(mx.array_equal(first.view(bits), second.view(bits))))


def error(found: mx.array, expected: mx.array) -> float:
    ours, right = (read(each.astype(mx.float32)) for each in (found, expected))
    assert ours.shape == right.shape
    return float(np.abs(ours - right).max() / np.abs(right).max())


def check(kernels: Replay, case: Case, tolerance: float) -> None:
    """Outputs and states are those of the specification."""
    rows, readout, states = case
    plain = PlainReplay()
    found = kernels.outputs(rows, readout, states, ALL_ROWS)
    assert error(found, plain.outputs(rows, readout, states, ALL_ROWS)) <= tolerance
    after = kernels.states(rows, states, ACCEPTED)
    assert error(after, plain.states(rows, states, ACCEPTED)) <= tolerance
    assert same_bits(after[-1], states[2]), "no row follows it"


def check_rows(kernels: Replay, case: Case) -> None:
    """Each row's output, and the state after it, are mlx-lm's of that row alone."""
    rows, readout, states = case
    together = kernels.outputs(rows, readout, states, ALL_ROWS)
    for index, first, count in ALL_ROWS.table:
        state = states[index : index + 1]
        for row in range(first, first + count):
            output, state = row_alone(rows, readout, row, state)
            assert same_bits(output.reshape(together[row].shape), together[row])
            after = kernels.states(rows, states, Spans([(index, first, row - first + 1)]))
            assert same_bits(after, state)


@pytest.mark.parametrize("name", each_of(NAMES, plain=("delta", "ssm")))
@pytest.mark.parametrize("dtype", [mx.float32, pytest.param(mx.bfloat16, marks=SLOW)])
def test_rows_are_right_and_pass_every_check(
    name: str, dtype: mx.Dtype, checked_backend: MetalBackend
) -> None:
    tolerance = 2e-6 if dtype == mx.float32 else 1e-2
    check(checked_backend.replay, cases(dtype)[name], tolerance)


@pytest.mark.parametrize("name", each_of(NAMES, plain=("delta",)))
@pytest.mark.parametrize("dtype", [mx.bfloat16, pytest.param(mx.float32, marks=SLOW)])
def test_a_row_equals_mlx_lm_recurrence_of_it_alone(name: str, dtype: mx.Dtype) -> None:
    check_rows(Replay(Kernels(emulated_factory())), cases(dtype)[name])


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_rows_in_float16_are_right_and_those_of_mlx_lm(
    name: str, checked_backend: MetalBackend
) -> None:
    case = cases(mx.float16)[name]
    check(checked_backend.replay, case, 2e-3)
    check_rows(checked_backend.replay, case)


@pytest.mark.parametrize("make", [delta_case, ssm_case])
def test_states_are_replayed_from_where_they_were(make: Callable[..., Case]) -> None:
    """Two rows and then two more leave the state of four."""
    rows, _, states = make(mx.float32)
    for ops in (PlainReplay(), Replay(Kernels(emulated_factory()))):
        half = ops.states(rows, states, Spans([(0, 1, 2)]))
        whole = ops.states(rows, half, Spans([(0, 3, 2)]))
        assert same_bits(whole, ops.states(rows, states, Spans([(0, 1, 4)])))


def test_rows_that_are_not_taken() -> None:
    rows, _, states = delta_case(mx.float32)
    assert refusal(rows, states) is None
    assert "48 numbers" in str(refusal(rows, states[..., :48]))
    assert "320 numbers" in str(refusal(rows, mx.zeros((1, 4, 6, 320))))
    strange = replace(rows, g=rows.g.astype(mx.int32))
    assert "int32" in str(refusal(strange, states))
    with pytest.raises(ValueError, match="48 numbers"):
        Replay(Kernels(emulated_factory())).states(rows, states[..., :48], ACCEPTED)


def test_a_shape_is_dispatched_once_and_spans_may_change() -> None:
    """A step has other drafts than the one before, and the same number of sequences."""
    built: list[KernelSpec] = []

    def factory(spec: KernelSpec, _source: str) -> Kernel:
        built.append(spec)
        return lambda **call: [mx.zeros(call["output_shapes"][0], call["output_dtypes"][0])]

    kernels = Replay(Kernels(factory))
    for make in (delta_case, ssm_case):
        rows, readout, states = make(mx.bfloat16)
        for spans in (ALL_ROWS, Spans([(2, 0, 4), (0, 4, 1), (1, 5, 1)])):
            found = kernels.outputs(rows, readout, states, spans)
            assert (found.shape, found.dtype) == rows.outputs
        after = kernels.states(rows, states, ACCEPTED)
        assert (after.shape, after.dtype) == ((len(ACCEPTED), *states.shape[1:]), mx.float32)
    assert len(built) == 2


@pytest.mark.slow
def test_a_row_of_a_draft_takes_fewer_instructions_than_a_call() -> None:
    """The state is loaded once for all of them, and stored once."""

    def counted(num_rows: int) -> float:
        made: list[MetalKernel] = []

        def factory(spec: KernelSpec, source: str) -> Kernel:
            kernel = emulated_factory(count=True)(spec, source)
            assert isinstance(kernel, MetalKernel)
            made.append(kernel)
            return kernel

        rows, readout, states = delta_case(mx.float16, 128, num_rows=num_rows)
        Replay(Kernels(factory)).outputs(rows, readout, states, Spans([(0, 0, num_rows)]))
        assert made[0].statistics is not None
        return made[0].statistics.num_instructions

    one, two, five = (counted(num_rows) for num_rows in (1, 2, 5))
    assert five - two == pytest.approx(3 * (two - one), rel=0.02)
    assert two - one < 0.95 * one


def test_inputs_of_a_kernel_are_those_of_rows() -> None:
    """And outputs are read with what each names."""
    for make in (delta_case, ssm_case):
        rows, readout, _ = make(mx.float32)
        names = {each.name for each in fields(rows)} | set(rows.readout(readout))
        assert names | {"state", "spans"} == set(rows.spec.inputs)
        assert rows.readout(()).keys() == rows.readout(readout).keys()

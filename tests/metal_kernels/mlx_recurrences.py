"""mlx-lm's own recurrences of single rows, from its kernels' texts, as a Mac computes them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import gated_delta, ssm

from metal_kernels.replay import DeltaRows, Readout, Rows
from tests.emulator import metal_kernel

Kernel = Callable[..., list[mx.array]]


def row_alone(rows: Rows, readout: Readout, row: int, state: mx.array) -> tuple[mx.array, mx.array]:
    """A row's output and the state after it, each (1, ...)."""
    step = _delta if isinstance(rows, DeltaRows) else _ssm
    output, after = step(rows, readout, row, state)
    return output, after


def _delta(rows: Any, readout: Readout, row: int, state: mx.array) -> Sequence[mx.array]:
    arrays = (readout[0], rows.k, rows.v, rows.g, rows.beta)
    one = [array[row : row + 1][None] for array in arrays]
    with emulated_recurrences():
        found: Sequence[mx.array] = gated_delta.gated_delta_kernel(*one, state)
    return found


def _ssm(rows: Any, readout: Readout, row: int, state: mx.array) -> Sequence[mx.array]:
    at = slice(row, row + 1)
    c, d = readout
    with emulated_recurrences(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(ssm, "compute_dt", lambda dt, *_: dt)
        found: Sequence[mx.array] = ssm.ssm_update_kernel(
            rows.x[at][None], rows.A_log, rows.B[at][None], c[at][None], d, rows.dt[at][None], None,
            state, (0.0, 1.0),
        )  # fmt: skip
    return found


_DELTA: dict[str, tuple[Any, ...]] = {
    "_gated_delta_kernel": ("_make_gated_delta_kernel", False, False),
    "_gated_delta_kernel_vec": ("_make_gated_delta_kernel", False, True),
    "_gated_delta_kernel_packed": ("_make_gated_delta_packed_kernel",),
}


_SSM: dict[str, tuple[Any, ...]] = {"_ssm_kernel": ("make_ssm_kernel",)}


@contextmanager
def emulated_recurrences() -> Iterator[None]:
    """Let mlx-lm dispatch its recurrent layers' kernels to the emulator."""
    with pytest.MonkeyPatch.context() as patch:
        for module, kernels in ((gated_delta, _DELTA), (ssm, _SSM)):
            for name, made in kernels.items():
                patch.setattr(module, name, _built(module, *made))
        yield


@functools.cache
def _built(module: Any, make: str, *arguments: bool) -> Kernel:
    """A kernel of mlx-lm by the emulator."""

    def built(*, name: str, input_names: list[str], output_names: list[str], source: str) -> Kernel:
        kernel = metal_kernel(name, input_names, output_names, source, strict=False)

        def call(*, inputs: Sequence[Any], **options: Any) -> list[mx.array]:
            arrays = [mx.array(each) if isinstance(each, int) else each for each in inputs]
            return kernel(inputs=arrays, **options)

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mx.metal, "is_available", lambda: True)
        patch.setattr(mx.fast, "metal_kernel", built)
        kernel: Kernel = getattr(module, make)(*arguments)
    return kernel

"""The self-test passes on correct kernels, and says what is wrong with others."""

from __future__ import annotations

import re
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from metal_kernels.kernels import Kernel, KernelSpec
from metal_kernels.metal import MetalBackend
from metal_kernels.selftest import why_not_in_place
from tests.emulated import emulated_factory


def test_pools_are_written_in_place(fast_backend: MetalBackend) -> None:
    assert why_not_in_place(fast_backend) is None


class EmulatedMachine:
    """The emulator; subclasses plant one error each."""

    def __init__(self) -> None:
        self._make = emulated_factory()

    def __call__(self, spec: KernelSpec, source: str) -> Kernel:
        kernel = self._make(spec, source)

        def call(**arguments: Any) -> list[mx.array]:
            return self.dispatch(spec, kernel, arguments)

        return call

    def dispatch(
        self, spec: KernelSpec, kernel: Kernel, arguments: dict[str, Any]
    ) -> list[mx.array]:
        outputs: list[mx.array] = kernel(**arguments)
        return outputs


class CopiesInputs(EmulatedMachine):
    """As mlx does with an input that is not contiguous."""

    def dispatch(
        self, spec: KernelSpec, kernel: Kernel, arguments: dict[str, Any]
    ) -> list[mx.array]:
        if spec.writes_pools:
            arguments["inputs"] = [mx.array(array) for array in arguments["inputs"]]
        return super().dispatch(spec, kernel, arguments)


class WritesLate(EmulatedMachine):
    """Each write happens after the read that should have waited for it."""

    def __init__(self) -> None:
        super().__init__()
        self._late: list[tuple[Kernel, dict[str, Any]]] = []

    def dispatch(
        self, spec: KernelSpec, kernel: Kernel, arguments: dict[str, Any]
    ) -> list[mx.array]:
        if spec.name.startswith("write_kv"):
            self._late.append((kernel, arguments))
            return [mx.zeros(8, mx.int32)]
        outputs = super().dispatch(spec, kernel, arguments)
        if spec.name == "paged_decode":
            for late, its_arguments in self._late:
                late(**its_arguments)
            self._late.clear()
        return outputs


class WritesEarly(EmulatedMachine):
    """No read waits: all of them happen after the last write."""

    def __init__(self) -> None:
        super().__init__()
        self._waiting: list[tuple[KernelSpec, Kernel, dict[str, Any], list[mx.array]]] = []

    def dispatch(
        self, spec: KernelSpec, kernel: Kernel, arguments: dict[str, Any]
    ) -> list[mx.array]:
        shapes = zip(arguments["output_shapes"], arguments["output_dtypes"], strict=True)
        if spec.name in ("paged_decode", "merge_partitions"):
            outputs = [mx.zeros(shape, dtype) for shape, dtype in shapes]
            mx.eval(outputs)
            self._waiting.append((spec, kernel, arguments, outputs))
            return outputs
        if spec.name == "copy_pages":
            for its_spec, its_kernel, its_arguments, promised in self._waiting:
                computed = super().dispatch(its_spec, its_kernel, its_arguments)
                for old, new in zip(promised, computed, strict=True):
                    np.array(old, copy=False)[:] = np.array(new)
        return super().dispatch(spec, kernel, arguments)


class ForgetsSingleRows(EmulatedMachine):
    def dispatch(
        self, spec: KernelSpec, kernel: Kernel, arguments: dict[str, Any]
    ) -> list[mx.array]:
        if spec.name == "write_kv_tokens":
            return [mx.zeros(8, mx.int32)]
        return super().dispatch(spec, kernel, arguments)


class ForgetsCopies(EmulatedMachine):
    def dispatch(
        self, spec: KernelSpec, kernel: Kernel, arguments: dict[str, Any]
    ) -> list[mx.array]:
        if spec.name == "copy_pages":
            return [mx.zeros(8, mx.int32)]
        return super().dispatch(spec, kernel, arguments)


class Miscomputes(EmulatedMachine):
    def dispatch(
        self, spec: KernelSpec, kernel: Kernel, arguments: dict[str, Any]
    ) -> list[mx.array]:
        outputs = super().dispatch(spec, kernel, arguments)
        return [outputs[0] * 1.01] if spec.name == "merge_partitions" else outputs


class RefusesTheText(EmulatedMachine):
    def dispatch(
        self, spec: KernelSpec, kernel: Kernel, arguments: dict[str, Any]
    ) -> list[mx.array]:
        raise RuntimeError("[metal::Device] Unable to build metal library from source\nerror: ...")


@pytest.mark.parametrize(
    ("machine", "reason"),
    [
        (CopiesInputs, "keys written by a kernel are not in the pool: mlx handed it a copy"),
        (WritesLate, "step 0 attended over keys that were not written yet"),
        (WritesEarly, "step 0 attended over the keys of step 3"),
        (ForgetsSingleRows, "keys written by a kernel are not in the pool"),
        (ForgetsCopies, "a page of keys was not copied"),
        (Miscomputes, "step 0 attended over a mixture of keys"),
        (RefusesTheText, "a kernel does not run: .*Unable to build metal library"),
    ],
)
def test_the_error_is_named(machine: type[EmulatedMachine], reason: str) -> None:
    found = why_not_in_place(MetalBackend(machine()))
    assert found is not None
    assert re.match(reason, found), found

"""The self-test passes on correct kernels, says what is wrong with others, and has a control."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from metal_kernels import proof_steps
from metal_kernels.kernels import Kernel, KernelSpec, on_metal
from metal_kernels.metal import DTYPES, MetalBackend
from metal_kernels.selftest import (
    QUICK,
    QUICK_Q8,
    QUICK_WAYS,
    FenceLoad,
    FenceProof,
    every_thorough_load,
    in_way,
    prove,
    thorough,
    why_not_in_place,
)
from metal_kernels.step_ways import StepWay
from tests.device_errors import broken, in_a_thread
from tests.emulated import emulated_factory, small_load
from tests.model.test_step_graphs import HashingFactory


def small(dtype: mx.Dtype = mx.float32) -> FenceLoad:
    return small_load(thorough(dtype))


def test_pools_are_written_in_place(fast_backend: MetalBackend) -> None:
    assert why_not_in_place(fast_backend) is None


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_pools_of_every_dtype_are_written_in_place(
    dtype: mx.Dtype, fast_backend: MetalBackend
) -> None:
    assert why_not_in_place(fast_backend, small(dtype)) is None


@pytest.mark.slow
def test_pools_in_8_bits_are_written_in_place(fast_backend: MetalBackend) -> None:
    for load in (QUICK_Q8, replace(small(mx.bfloat16), is_quantised=True)):
        assert why_not_in_place(fast_backend, load) is None


def test_a_thorough_load_in_8_bits_is_as_large() -> None:
    [load] = [load for load in every_thorough_load() if load.label == "q8"]
    assert load.pool_bytes == pytest.approx(64e6, rel=0.1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_thorough_load_has_a_pool_of_64_megabytes_and_the_quick_one_of_half_a_megabyte(
    dtype: mx.Dtype,
) -> None:
    assert thorough(dtype).pool_bytes == pytest.approx(64e6, rel=0.1)
    assert QUICK.pool_bytes < 0.5e6


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


class Postpones(EmulatedMachine):
    """Writes happen when a kernel binds their fence, and at the end: as late as MLX may do them."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: set[str] = set()
        self._waiting: list[tuple[mx.array, Kernel, dict[str, Any]]] = []

    def dispatch(
        self, spec: KernelSpec, kernel: Kernel, arguments: dict[str, Any]
    ) -> list[mx.array]:
        self.ran.add(spec.name)
        self._run(arguments["inputs"])
        if spec.name == "rotate_and_write":
            rotated = mx.zeros(arguments["output_shapes"][0], arguments["output_dtypes"][0])
        elif not spec.name.startswith("write_kv"):
            return super().dispatch(spec, kernel, arguments)
        fence = mx.zeros(8, mx.int32)
        self._waiting.append((fence, kernel, arguments))
        return [rotated, fence] if spec.name == "rotate_and_write" else [fence]

    def _run(self, bound: list[mx.array]) -> None:
        """What `bound` waits for, and what that waited for, oldest first."""
        ids = {id(array) for array in bound}
        due = [entry for entry in self._waiting if id(entry[0]) in ids]
        self._waiting = [entry for entry in self._waiting if id(entry[0]) not in ids]
        for _, kernel, arguments in due:
            self._run(arguments["inputs"])
            kernel(**arguments)


class Miscomputes(EmulatedMachine):
    def dispatch(
        self, spec: KernelSpec, kernel: Kernel, arguments: dict[str, Any]
    ) -> list[mx.array]:
        outputs = super().dispatch(spec, kernel, arguments)
        return [outputs[0] * 1.01] if spec.name == "merge_partitions" else outputs


class ChunksOfAnotherStep(EmulatedMachine):
    """A chunk whose answer is that of the step before."""

    def __init__(self) -> None:
        super().__init__()
        self._before: mx.array | None = None

    def dispatch(
        self, spec: KernelSpec, kernel: Kernel, arguments: dict[str, Any]
    ) -> list[mx.array]:
        outputs = super().dispatch(spec, kernel, arguments)
        if spec.name == "paged_prefill":
            answer, self._before = self._before, outputs[0]
            return [outputs[0] if answer is None else answer, outputs[1]]
        return outputs


class RefusesTheThreads(EmulatedMachine):
    def dispatch(
        self, spec: KernelSpec, kernel: Kernel, arguments: dict[str, Any]
    ) -> list[mx.array]:
        raise ValueError("[metal_kernel] Thread group size (512) is greater than 448")


class RefusesTheText(EmulatedMachine):
    def dispatch(
        self, spec: KernelSpec, kernel: Kernel, arguments: dict[str, Any]
    ) -> list[mx.array]:
        raise RuntimeError("[metal::Device] Unable to build metal library from source\nerror: ...")


def test_the_error_is_named() -> None:
    for machine, reason in [
        (CopiesInputs, "keys written by a kernel are not in the pool: mlx handed it a copy"),
        (WritesLate, "step 0 attended over keys that were not written yet"),
        (WritesEarly, "step 0 attended over the keys of step 3"),
        (ForgetsSingleRows, "keys written by a kernel are not in the pool"),
        (ForgetsCopies, "a page of keys was not copied"),
        (Miscomputes, "step 0 attended over a mixture of keys"),
        (ChunksOfAnotherStep, "the chunk of step 1 attended over the keys of step 0"),
        (RefusesTheThreads, "a kernel does not run: .*Thread group size"),
        (RefusesTheText, "a kernel does not run: .*Unable to build metal library"),
    ]:
        found = why_not_in_place(MetalBackend(machine()))
        assert found is not None, machine
        assert re.match(reason, found), found


def test_the_control_fails_where_only_fences_keep_the_order() -> None:
    [proof] = prove(Postpones(), [small()])
    assert proof.with_fences is None
    assert proof.without_fences is not None


@pytest.fixture
def runs_recorded_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Emulated kernels cannot be recorded: the function that would be runs in their place, over whole pools."""
    monkeypatch.setattr(proof_steps, "record", lambda step: step)
    monkeypatch.setattr(proof_steps, "first_pages", list)


@pytest.mark.usefixtures("runs_recorded_steps")
@pytest.mark.parametrize("way", StepWay)
def test_every_way_of_a_step_is_proved_with_its_control(way: StepWay) -> None:
    factory = Postpones()
    [proof] = prove(factory, [in_way(small(mx.float16), way)])
    assert proof.with_fences is None
    assert proof.without_fences is not None
    assert factory.ran & ONLY_IN[way]


# Kernels that no step launches in another way; a recorded one writes all rows one by one.
ONLY_IN = {
    StepWay.ROTATED: {"rotate_and_write"},
    StepWay.GATHERED: {"gather_pages"},
    StepWay.BLOCKS: {"gather_pages"},
    StepWay.RECORDED: {"write_kv_tokens"},
}


@pytest.mark.usefixtures("compiled", "on_a_cpu")  # a GPU has no float64
def test_steps_are_recorded_once() -> None:
    """A graph of as many kernels for three more steps, without a call of Python's."""
    calls = []
    for steps in (4, 7):
        factory = HashingFactory()
        load = replace(QUICK_WAYS[StepWay.RECORDED], steps=steps, dtype=mx.float32)
        assert why_not_in_place(MetalBackend(factory), load) is not None, "they compute nothing"
        calls.append(factory.num_calls)
    assert calls[1] - calls[0] == 3, "a chunk for each step"


def test_the_control_passes_on_a_machine_that_computes_in_order_and_the_log_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level("INFO", "metal_kernels"):
        proofs = list(prove(emulated_factory(), [small(dtype) for dtype in DTYPES]))
    assert proofs == [FenceProof(small(dtype), None, None) for dtype in DTYPES]
    assert "with fences right, without right as well, so it shows nothing" in caplog.text


class CountsFences(EmulatedMachine):
    """How many fences of other kernels a kernel binds."""

    def __init__(self) -> None:
        super().__init__()
        self.bound = 0
        self._fences: list[mx.array] = []

    def dispatch(
        self, spec: KernelSpec, kernel: Kernel, arguments: dict[str, Any]
    ) -> list[mx.array]:
        known = {id(fence) for fence in self._fences}
        self.bound += sum(id(array) in known for array in arguments["inputs"])
        outputs = super().dispatch(spec, kernel, arguments)
        if "fence" in spec.outputs:
            self._fences.append(outputs[spec.outputs.index("fence")])
        return outputs


def test_the_control_binds_no_fence() -> None:
    alone, with_control = CountsFences(), CountsFences()
    assert why_not_in_place(MetalBackend(alone), small()) is None
    assert next(prove(with_control, [small()])).with_fences is None
    assert with_control.bound == alone.bound > 0


def test_the_control_launches_kernels_in_the_same_order() -> None:
    """Fences of writes cannot be computed: with and without them, no kernel runs that follows."""
    ran: list[str] = []

    class FencesFail(EmulatedMachine):
        def dispatch(
            self, spec: KernelSpec, kernel: Kernel, arguments: dict[str, Any]
        ) -> list[mx.array]:
            outputs = super().dispatch(spec, kernel, arguments)
            ran.append(spec.name)
            if spec.name == "write_kv_tokens":
                return [broken().astype(mx.int32)]
            return outputs

    proof = in_a_thread(lambda: next(prove(FencesFail(), [small()])))
    for reason in (proof.with_fences, proof.without_fences):
        assert reason is not None
        assert "a kernel does not run" in reason
    assert set(ran) == {"write_kv_pages", "write_kv_tokens"}


@pytest.mark.metal
@pytest.mark.skipif(not mx.metal.is_available(), reason="needs a Mac's GPU, or tests.emulated_gpu")
def test_thorough_loads_are_right_on_the_gpu() -> None:
    found = {proof.load.label: proof.with_fences for proof in prove(on_metal)}
    ways = [f"float16, {way.value}" for way in StepWay]
    assert found == dict.fromkeys(["float16", "bfloat16", "float32", "q8", *ways])

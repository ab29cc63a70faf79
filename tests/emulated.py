"""The product's Metal kernels on the emulator: a `Factory`, and the backend made of it."""

from __future__ import annotations

from dataclasses import replace

from metal_kernels.kernels import Factory, Kernel, KernelSpec
from metal_kernels.metal import MetalBackend
from metal_kernels.selftest import FenceLoad
from tests.emulator import metal_kernel


def emulated_factory(*, check: bool = False, count: bool = False) -> Factory:
    """Compile kernels for the CPU; `check` runs them with every run-time check, `count` counts instructions.

    Without the emulator's second front end: tests/strict reads every text by a stricter one.
    """

    def make(spec: KernelSpec, source: str) -> Kernel:
        return metal_kernel(
            spec.name,
            spec.inputs,
            spec.outputs,
            source,
            spec.header,
            writable_inputs=("k_pool", "v_pool") if spec.writes_pools else (),
            partly_written=spec.partly_written,
            check=check,
            count=count,
            strict=False,
        )

    return make


def emulated_backend(*, check: bool = False) -> MetalBackend:
    return MetalBackend(emulated_factory(check=check))


def small_load(load: FenceLoad) -> FenceLoad:
    """What the emulator computes in a moment."""
    return replace(
        load,
        num_sequences=2,
        length=75,
        kv_heads=2,
        group=2,
        head_dim=64,
        chunk=9,
        steps=3,
    )

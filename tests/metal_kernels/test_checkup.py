"""The check-up detects a wrong kernel, and measures bandwidth."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from metal_kernels.checkup import OpCheck, Speeds, check_ops, measure
from metal_kernels.metal import DTYPES, MetalBackend
from tests.emulated import emulated_factory

OPS = ["write_kv", "copy_pages", "paged_decode", "paged_prefill"]


def failing(backend: MetalBackend) -> set[str]:
    return {check.op for check in check_ops(backend, [64]) if not check.is_right}


def spoiled(kernel: str) -> MetalBackend:
    """Emulated kernels, one of which does nothing."""
    make = emulated_factory()

    def factory(spec: Any, source: str) -> Any:
        if spec.name != kernel:
            return make(spec, source)

        def call(**arguments: Any) -> list[mx.array]:
            shapes = zip(arguments["output_shapes"], arguments["output_dtypes"], strict=True)
            return [mx.zeros(shape, dtype) for shape, dtype in shapes]

        return call

    return MetalBackend(factory)


def test_every_op_of_every_dtype_is_right(fast_backend: MetalBackend) -> None:
    checks = list(check_ops(fast_backend, [64]))
    assert [(check.dtype, check.op) for check in checks] == [(d, op) for d in DTYPES for op in OPS]
    for check in checks:
        assert check.is_right, check
        assert (check.error == 0) == (check.op in ("write_kv", "copy_pages"))


@pytest.mark.parametrize(
    ("kernel", "op"),
    [
        ("write_kv_pages", "write_kv"),
        ("write_kv_tokens", "write_kv"),
        ("copy_pages", "copy_pages"),
        ("paged_decode", "paged_decode"),
        ("merge_partitions", "paged_decode"),
        ("paged_prefill", "paged_prefill"),
    ],
)
def test_a_kernel_that_does_nothing_is_found(kernel: str, op: str) -> None:
    assert op in failing(spoiled(kernel))


def test_an_error_of_nan_is_not_right() -> None:
    assert not OpCheck("paged_decode", mx.float16, 64, float("nan"), 1.0).is_right


def test_bandwidth_is_measured_in_gigabytes_per_second(fast_backend: MetalBackend) -> None:
    speeds = measure(fast_backend, batch=2, context=64, kv_heads=2, head_dim=64, repeats=1)
    assert speeds.decode > 0
    assert speeds.write_pages > 0
    assert speeds.write_tokens > 0


def test_the_gain_of_whole_pages_is_a_ratio() -> None:
    assert Speeds(decode=1.0, write_pages=12.0, write_tokens=4.0).page_gain == 3.0

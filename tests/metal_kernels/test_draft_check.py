"""The self-test of rows of drafts passes by the kernels, and fails where a row is another one."""

from __future__ import annotations

import mlx.core as mx
import pytest

from metal_kernels.draft_check import why_not_together
from metal_kernels.kernels import Factory, Kernel, KernelSpec
from metal_kernels.metal import MetalBackend
from tests.emulated import emulated_factory


@pytest.mark.slow
def test_the_kernels_pass(fast_backend: MetalBackend) -> None:
    assert why_not_together(fast_backend) is None


def factory(*, wrong: str = "", error: Exception | None = None) -> Factory:
    """Kernels that answer zeros; `wrong` one answers ones, and raises `error` if there is one."""

    def make(spec: KernelSpec, source: str) -> Kernel:
        def call(**options: object) -> list[mx.array]:
            if spec.name == wrong and error is not None:
                raise error
            shapes, dtypes = options["output_shapes"], options["output_dtypes"]
            value = mx.ones if spec.name == wrong else mx.zeros
            return [value(*each) for each in zip(shapes, dtypes, strict=True)]  # type: ignore[call-overload]

        return call  # type: ignore[return-value]

    return make


@pytest.mark.parametrize("kernel", ["draft_decode", "grouped_drafts"])
@pytest.mark.parametrize("error", [RuntimeError("Unable to build"), ValueError("too many threads")])
def test_a_kernel_that_the_compiler_refuses_is_a_reason(error: Exception, kernel: str) -> None:
    reason = why_not_together(MetalBackend(factory(wrong=kernel, error=error)))
    assert reason == str(error)


@pytest.mark.slow
@pytest.mark.parametrize("seen", ["key + k < end[h] ?", "&& mine < end[r];"])
def test_a_row_with_other_bits_is_a_reason(seen: str) -> None:
    right = emulated_factory()

    def make(spec: KernelSpec, source: str) -> Kernel:
        # The last row's last key is left out.
        return right(spec, source.replace(seen, seen.replace(" <", " + 1 <")))

    assert why_not_together(MetalBackend(make)) == "rows are others than alone in mlx.core.float16"

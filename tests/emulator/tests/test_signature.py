"""The text the emulator compiles is the text MLX would compile.

Inside an `mx.export_function` trace a Metal kernel can be called on any machine, and with
`verbose=True` MLX prints the source it made: a check that needs neither a Mac nor a compiler.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from tests.emulator import metal_kernel
from tests.emulator.signature import InputType, KernelBody, Template, generate

PLAIN = "uint i = thread_position_in_grid.x; out[i] = a[i];"
EVERYTHING = """
  uint i = thread_position_in_grid.x + a_shape[0] + a_strides[1] + a_ndim + b_shape[0];
  uint j = simdgroup_index_in_threadgroup + thread_index_in_simdgroup + threads_per_simdgroup;
  threadgroup float w[4];
  if (N > 3 && F) out[i] = T(a[j]) + T(c);
"""
ALL_ATTRIBUTES = (
    "dispatch_quadgroups_per_threadgroup dispatch_simdgroups_per_threadgroup grid_size "
    "dispatch_threads_per_threadgroup grid_origin quadgroup_index_in_threadgroup "
    "quadgroups_per_threadgroup simdgroups_per_threadgroup thread_execution_width "
    "thread_index_in_quadgroup thread_index_in_threadgroup thread_position_in_threadgroup "
    "threadgroup_position_in_grid threadgroups_per_grid threads_per_grid threads_per_threadgroup"
)

Case = tuple[str, str, Sequence[mx.array], Sequence[mx.Dtype], Template, bool]


def case(
    name: str,
    source: str,
    inputs: Sequence[mx.array],
    outputs: Sequence[mx.Dtype],
    template: Template = (),
    atomic: bool = False,
) -> Case:
    return name, source, inputs, outputs, template, atomic


def zeros(dtype: mx.Dtype, *shape: int) -> mx.array:
    return mx.zeros(shape, dtype)


CASES = [
    case("plain", PLAIN, [zeros(mx.float32, 16)], [mx.float32]),
    case("small", PLAIN, [zeros(mx.float32, 7)], [mx.float32]),
    case("eight", PLAIN, [zeros(mx.float32, 8)], [mx.float32]),
    case("scalar", "out[0] = a;", [zeros(mx.int32)], [mx.int64]),
    case(
        "everything",
        EVERYTHING,
        [zeros(mx.bfloat16, 4, 8), zeros(mx.uint8, 3), zeros(mx.float16)],
        [mx.float16],
        [("T", mx.float16), ("N", 12), ("F", True)],
    ),
    case("atomic", PLAIN, [zeros(mx.uint32, 9)], [mx.uint32], atomic=True),
    case("two_outputs", "b[0] = a[0]; out[0] = 1;", [zeros(mx.int8, 9)], [mx.int8, mx.bool_]),
    case("negative", "out[0] = N;", [zeros(mx.int16, 9)], [mx.uint16], [("N", -3)]),
    case("attributes", f"uint {ALL_ATTRIBUTES};", [zeros(mx.uint64, 9)], [mx.uint64]),
    case("types", "out[0] = T();", [zeros(mx.bool_, 9)], [mx.float32], [("T", mx.complex64)]),
]


@pytest.mark.parametrize("the_case", CASES, ids=[c[0] for c in CASES])
def test_a_verbose_call_prints_what_mlx_prints(
    the_case: Case, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    name, source, inputs, outputs, template, atomic = the_case
    input_names = ["a", "b", "c"][: len(inputs)]
    output_names = ["b", "out"][-len(outputs) :]
    header = "constant int unused = 1;\n"
    kernel: Any = mx.fast.metal_kernel(
        name, input_names, output_names, source, header, atomic_outputs=atomic
    )

    def call(*arrays: mx.array) -> list[mx.array]:
        results: list[mx.array] = kernel(
            inputs=list(arrays),
            template=list(template),
            output_shapes=[(16,)] * len(outputs),
            output_dtypes=list(outputs),
            grid=(16, 1, 1),
            threadgroup=(16, 1, 1),
            verbose=True,
        )
        return results

    mx.export_function(str(tmp_path / "traced.mlxfn"), call, *inputs)
    body = KernelBody(name, tuple(input_names), tuple(output_names), source, header, atomic)
    types = [InputType(a.dtype, a.ndim, a.size) for a in inputs]
    listing = generate(body, types, outputs, template).listing(body)
    assert f"{listing}\n" == capfd.readouterr().out


def test_the_emulator_prints_that_listing(capsys: pytest.CaptureFixture[str]) -> None:
    kernel = metal_kernel("shown", ["x"], ["out"], "out[0] = x;", "// header\n")
    for _ in range(2):  # whether it was compiled before or not
        kernel(
            inputs=[3.0],
            output_shapes=[(1,)],
            output_dtypes=[mx.float32],
            grid=(1, 1, 1),
            threadgroup=(1, 1, 1),
            verbose=True,
        )
        assert capsys.readouterr().out == (
            "Generated source code for `shown`:\n```\n// header\n"
            "[[kernel]] void custom_kernel_shown_floats_float(\n"
            "  const constant float& x [[buffer(0)]],\n  device float* out [[buffer(1)]]) {\n"
            "out[0] = x;\n}\n\n```\n"
        )

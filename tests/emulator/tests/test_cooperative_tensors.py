"""Products of cooperative tensors, as MLX's own kernels for neural accelerators use them."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from tests.emulator import KernelFault, OutputBuffer, metal_kernel
from tests.emulator.tests.mlx_headers import DTYPES, assert_close, load, random
from tests.emulator.tests.test_mlx_kernels import attention, steel_params

SIMD = 32
HEADER = "#include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>\n"


@pytest.mark.parametrize("name", ["half", "bfloat16_t"])
@pytest.mark.parametrize("dim", [64, 128])
def test_mlxs_attention_on_neural_accelerators(name: str, dim: int) -> None:
    """Unmodified: scores by transposed keys, outputs by values, four simdgroups of 16 rows."""
    heads, queries, keys, rows, block = 2, 41, 75, 64, 32
    q = random(DTYPES[name], 1, heads, queries, dim, seed=1)
    k, v = (random(DTYPES[name], 1, 1, keys, dim, seed=s) for s in (2, 3))
    params = steel_params(q, k, block)
    params["NQ"], params["NQ_aligned"], params["qL_rem"] = 1, 0, queries
    run = load(
        "steel/attn/kernels/steel_attention_nax.h",
        f"attention_nax<{name}, {rows}, {block}, {dim}, {dim}, 4, 1, float, float>",
        {200: False, 201: False, 301: True},
        check=True,
        strict=False,  # the second front end refuses references to members, which tiles return
    )
    out = run(
        {0: q, 1: k, 2: v, 4: params},
        {3: OutputBuffer(q.shape, q.dtype)},
        grid=(SIMD, heads * 4, 1),
        threadgroup=(SIMD, 4, 1),
    )[3]
    assert_close(out, attention(q, k, v, dim**-0.5, causal=True))


MULTIPLY = """
constexpr auto descriptor = mpp::tensor_ops::matmul2d_descriptor(
    16, N, K, LEFT, RIGHT, true,
    mpp::tensor_ops::matmul2d_descriptor::mode::multiply_accumulate);
mpp::tensor_ops::matmul2d<descriptor, metal::execution_simdgroup> product;
auto a = product.template get_left_input_cooperative_tensor<T, T, float>();
auto b = product.template get_right_input_cooperative_tensor<T, T, float>();
auto c = product.template get_destination_cooperative_tensor<decltype(a), decltype(b), float>();
const int lane = thread_index_in_simdgroup;
const int row = ((lane >> 2) & 4) | ((lane >> 1) & 3), column = (((lane >> 2) & 2) | (lane & 1)) * 4;
for (ushort i = 0; i < a.get_capacity(); i++) {
  const int shift = i / 8 * 16, r = row + i % 8 / 4 * 8, at = column + i % 4;
  a[i] = LEFT ? left[(r + shift) * 16 + at] : left[r * K + at + shift];
}
for (ushort i = 0; i < b.get_capacity(); i++) {
  const int shift = i / 8 * 16, r = row + i % 8 / 4 * 8, at = column + i % 4;
  const bool is_wide = RIGHT ? K == 32 : N == 32;
  b[i] = is_wide ? right[r * 32 + at + shift] : right[(r + shift) * 16 + at];
}
for (ushort i = 0; i < c.get_capacity(); i++) c[i] = 1.0f;
product.run(a, b, c);
for (ushort i = 0; i < c.get_capacity(); i++) {
  out[(row + i % 8 / 4 * 8) * N + column + i / 8 * 16 + i % 4] = c[i];
}
"""


@pytest.mark.parametrize(
    ("columns", "depth", "is_left", "is_right", "dtype"),
    [
        (32, 16, False, False, mx.float16),
        (32, 16, False, True, mx.bfloat16),
        (32, 16, True, False, mx.float32),
        (16, 32, False, False, mx.bfloat16),
        (16, 32, True, True, mx.float16),
    ],
    ids=str,
)
def test_products_of_transposed_matrices_are_added(
    columns: int, depth: int, is_left: bool, is_right: bool, dtype: mx.Dtype
) -> None:
    left = random(dtype, *((depth, 16) if is_left else (16, depth)), seed=1)
    right = random(dtype, *((columns, depth) if is_right else (depth, columns)), seed=2)
    kernel = metal_kernel(
        "multiply", ["left", "right"], ["out"], MULTIPLY, header=HEADER, check=True
    )
    (out,) = kernel(
        inputs=[left, right],
        template=[
            ("T", dtype),
            ("N", columns),
            ("K", depth),
            ("LEFT", int(is_left)),
            ("RIGHT", int(is_right)),
        ],
        output_shapes=[(16, columns)],
        output_dtypes=[mx.float32],
        grid=(SIMD, 1, 1),
        threadgroup=(SIMD, 1, 1),
    )
    a, b = (np.array(side.astype(mx.float32)) for side in (left, right))
    expected = 1 + (a.T if is_left else a) @ (b.T if is_right else b)
    assert np.abs(np.array(out) - expected).max() < 1e-4


@pytest.mark.parametrize(
    ("line", "mistake", "message"),
    [
        ("i < a.get_capacity()", "i < 9", "a lane has fewer elements"),
        ("product.run(a, b, c);", "if (lane > 3) product.run(a, b, c);", "inactive lanes"),
    ],
)
def test_a_wrong_use_is_found(line: str, mistake: str, message: str) -> None:
    kernel = metal_kernel(
        "multiply",
        ["left", "right"],
        ["out"],
        MULTIPLY.replace(line, mistake),
        header=HEADER,
        check=True,
    )
    with pytest.raises(KernelFault, match=message):
        kernel(
            inputs=[mx.ones((16, 16)), mx.ones((16, 32))],
            template=[("T", mx.float32), ("N", 32), ("K", 16), ("LEFT", 0), ("RIGHT", 0)],
            output_shapes=[(16, 32)],
            output_dtypes=[mx.float32],
            grid=(SIMD, 1, 1),
            threadgroup=(SIMD, 1, 1),
        )

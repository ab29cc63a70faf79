"""Simdgroup functions and simdgroup matrices, lane by lane."""

import mlx.core as mx
import numpy as np
import pytest
from numpy.typing import NDArray

from tests.emulator import metal_kernel

LANES = 32


def per_lane(expressions: list[str], x: mx.array, check: bool) -> NDArray[np.float32]:
    """The value of each expression in each of 32 lanes; `v` is the lane's element of x."""
    body = "uint l = thread_index_in_simdgroup;\nfloat v = x[l];\n"
    body += "".join(f"out[{k} * 32 + l] = {e};\n" for k, e in enumerate(expressions))
    kernel = metal_kernel("lanes", ["x"], ["out"], body, check=check)
    (out,) = kernel(
        inputs=[x],
        output_shapes=[(len(expressions), LANES)],
        output_dtypes=[mx.float32],
        grid=(LANES, 1, 1),
        threadgroup=(LANES, 1, 1),
    )
    return np.array(out)


@pytest.mark.parametrize("check", [False, True], ids=["fast", "check"])
def test_simd_functions_compute_what_their_names_say(check: bool) -> None:
    x = np.random.default_rng(0).uniform(0.5, 1.5, LANES).astype(np.float32)
    lanes = np.arange(LANES)
    pairs = x.reshape(8, 4)
    # For prefix functions the lanes up to this one; the exclusive form starts with its identity.
    expected = {
        "simd_sum(v)": np.full(LANES, x.sum()),
        "simd_product(v)": np.full(LANES, x.prod()),
        "simd_max(v)": np.full(LANES, x.max()),
        "simd_min(v)": np.full(LANES, x.min()),
        "simd_prefix_inclusive_sum(v)": np.cumsum(x),
        "simd_prefix_exclusive_sum(v)": np.cumsum(x) - x,
        "simd_prefix_inclusive_product(v)": np.cumprod(x),
        "simd_prefix_exclusive_product(v)": np.cumprod(x) / x,
        "simd_shuffle(v, ushort(31 - l))": x[::-1],
        "simd_broadcast(v, 5)": np.full(LANES, x[5]),
        "simd_broadcast_first(v)": np.full(LANES, x[0]),
        "simd_shuffle_xor(v, 6)": x[lanes ^ 6],
        "simd_shuffle_down(v, 3)": x[np.where(lanes + 3 > 31, lanes, lanes + 3)],
        "simd_shuffle_up(v, 3)": x[np.where(lanes < 3, lanes, lanes - 3)],
        "simd_shuffle_rotate_down(v, 3)": np.roll(x, -3),
        "simd_shuffle_rotate_up(v, 3)": np.roll(x, 3),
        "simd_shuffle_and_fill_down(v, 9.0f, 2)": np.append(x[2:], [9, 9]),
        "simd_shuffle_and_fill_up(v, 9.0f, 2)": np.append([9, 9], x[:-2]),
        "quad_sum(v)": pairs.sum(1).repeat(4),
        "quad_max(v)": pairs.max(1).repeat(4),
        "quad_min(v)": pairs.min(1).repeat(4),
        "quad_broadcast(v, 2)": pairs[:, 2].repeat(4),
        "quad_shuffle_xor(v, 1)": x[lanes ^ 1],
        "simd_and(l | 8)": np.full(LANES, 8),
        "simd_or(l)": np.full(LANES, 31),
        "simd_xor(l)": np.zeros(LANES),
        "simd_all(l < 32)": np.ones(LANES),
        "simd_any(l == 32)": np.zeros(LANES),
        "(ulong(simd_ballot(l < 3)) & 255)": np.full(LANES, 7),
        "simd_is_first()": lanes == 0,
        "simd_sum(float2(v, 1)).y": np.full(LANES, 32),
    }
    out = per_lane(list(expected), mx.array(x), check)
    for row, (name, values) in zip(out, expected.items(), strict=True):
        assert np.allclose(row, values, rtol=2e-5), name


def test_lanes_that_have_returned_take_no_part() -> None:
    kernel = metal_kernel(
        "half_of_them",
        ["x"],
        ["out"],
        "uint l = thread_index_in_simdgroup;\nif (l >= 20) return;\n"
        "out[l] = simd_sum(x[l]) + simd_prefix_exclusive_sum(1.0f);",
        check=True,
    )
    (out,) = kernel(
        inputs=[mx.arange(32).astype(mx.float32)],
        output_shapes=[(20,)],
        output_dtypes=[mx.float32],
        grid=(32, 1, 1),
        threadgroup=(32, 1, 1),
    )
    assert out.tolist() == [190 + lane for lane in range(20)]


def test_a_short_simdgroup_reduces_the_lanes_it_has() -> None:
    kernel = metal_kernel("short", ["x"], ["out"], "out[0] = simd_sum(1); out[1] = x[0];")
    (out,) = kernel(
        inputs=[mx.arange(9)],
        output_shapes=[(2,)],
        output_dtypes=[mx.int32],
        grid=(11, 1, 1),
        threadgroup=(11, 1, 1),
    )
    assert out.tolist() == [11, 0]


MULTIPLY = """
threadgroup T at[8 * 10], bt[8 * 8];
uint l = thread_index_in_simdgroup;
for (uint k = l; k < 64; k += 32) {
  at[k / 8 * 10 + k % 8] = a[k];
  bt[k] = b[k];
}
simdgroup_barrier(mem_flags::mem_threadgroup);
simdgroup_matrix<T, 8, 8> left, right;
simdgroup_matrix<float, 8, 8> sum(2.0f), product;
simdgroup_load(left, at, 10);
simdgroup_load(right, bt, 8, ulong2(0, 0), true);
simdgroup_multiply_accumulate(sum, left, right, sum);
simdgroup_store(sum, accumulated, 8);
simdgroup_load(right, b, 8);
simdgroup_multiply(product, left, right);
simdgroup_store(product, multiplied, 8, ulong2(0, 0), true);
simdgroup_matrix<float, 8, 8> filled = make_filled_simdgroup_matrix<float, 8, 8>(float(l));
simdgroup_store(filled, owners, 8);
"""


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
def test_matrices_load_multiply_and_store(dtype: mx.Dtype) -> None:
    keys = (mx.random.key(1), mx.random.key(2))
    a, b = (mx.random.normal((8, 8), key=key).astype(dtype) for key in keys)
    kernel = metal_kernel(
        "multiply", ["a", "b"], ["accumulated", "multiplied", "owners"], MULTIPLY, check=True
    )
    accumulated, multiplied, owners = kernel(
        inputs=[a, b],
        template=[("T", dtype)],
        output_shapes=[(8, 8)] * 3,
        output_dtypes=[mx.float32] * 3,
        grid=(32, 1, 1),
        threadgroup=(32, 1, 1),
    )
    left, right = (np.array(m.astype(mx.float32)) for m in (a, b))
    assert np.allclose(np.array(accumulated), left @ right.T + 2 * np.eye(8), atol=1e-5)
    assert np.allclose(np.array(multiplied), (left @ right).T, atol=1e-5)
    # Each lane owns two neighbours; MLX's kernels depend on which ones.
    owner = np.array(owners).astype(int)
    assert np.array_equal(owner[:, ::2], owner[:, 1::2])
    assert owner[0].tolist() == [0, 0, 1, 1, 8, 8, 9, 9]
    assert owner[:, 0].tolist() == [0, 2, 4, 6, 16, 18, 20, 22]


def test_a_matrix_is_diagonal_when_made_from_a_number() -> None:
    body = "simdgroup_matrix<float, 8, 8> m(x); simdgroup_store(m, out, 8);"
    (out,) = metal_kernel("diagonal", ["x"], ["out"], body, check=True)(
        inputs=[3.0],
        output_shapes=[(8, 8)],
        output_dtypes=[mx.float32],
        grid=(32, 1, 1),
        threadgroup=(32, 1, 1),
    )
    assert np.array_equal(np.array(out), 3 * np.eye(8, dtype=np.float32))


def test_functions_of_the_standard_library() -> None:
    x = np.linspace(0.1, 0.9, LANES, dtype=np.float32)
    expected = {
        "metal::exp(v)": np.exp(x),
        "fast::exp2(v)": np.exp2(x),
        "metal::precise::rsqrt(v)": x**-0.5,
        "log2(v)": np.log2(x),
        "tanh(v)": np.tanh(x),
        "pow(v, 3.0f)": x**3,
        "fma(v, 2.0f, 1.0f)": 2 * x + 1,
        "clamp(v, 0.3f, 0.6f)": x.clip(0.3, 0.6),
        "select(v, 0.0f, l > 3)": np.where(np.arange(LANES) > 3, 0, x),
        "dot(float4(v, 1, v, 2), float4(1, 2, 3, 4))": 4 * x + 10,
        "float4(v, float2(2, 3), 4).zy.x": np.full(LANES, 3),
        "(float3(v)).y": x,
        "((float2)(v)).x": x,
        "as_type<float>(as_type<uint>(v))": x,
        "max(int(l), 7)": np.maximum(np.arange(LANES), 7),
        "float(half(v) + 1.0h)": (x.astype(np.float16) + np.float16(1)).astype(np.float32),
        "extract_bits(l, 1, 3)": np.arange(LANES) >> 1 & 7,
        "popcount(l)": [bin(lane).count("1") for lane in range(LANES)],
        "abs(int(l) - 9)": abs(np.arange(LANES) - 9),
        "isinf(v / 0.0f)": np.ones(LANES),
        "numeric_limits<half>::max()": np.full(LANES, 65504),
        "float(numeric_limits<char>::lowest())": np.full(LANES, -128),
        "sign(v - 0.5f)": np.sign(x - 0.5),
    }
    out = per_lane(list(expected), mx.array(x), check=False)
    for row, (name, values) in zip(out, expected.items(), strict=True):
        assert np.allclose(row, values, rtol=2e-5), name

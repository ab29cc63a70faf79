"""MLX's own matrix products, unmodified: steel GEMM and the quantised ones."""

import mlx.core as mx
import numpy as np
import pytest
from numpy.typing import NDArray

from tests.emulator import OutputBuffer
from tests.emulator.tests.mlx_headers import DTYPES, assert_close, exact, load, random, scalar

SIMD = 32
GEMM = "steel/gemm/gemm.h steel/gemm/kernels/steel_gemm_fused.h"
QUANTISED = "steel/gemm/gemm.h quantized_utils.h quantized.h"
GROUP_SIZE = 64

PARAMS = np.dtype(
    [
        *((name, np.int32) for name in ("M", "N", "K", "lda", "ldb", "ldd", "tiles_n", "tiles_m")),
        *((f"batch_stride_{name}", np.int64) for name in ("a", "b", "d")),
        *((name, np.int32) for name in ("swizzle_log", "gemm_k_iterations_aligned", "batch_ndim")),
        ("padding", np.int32),
    ]
)

every_dtype = pytest.mark.parametrize("name", DTYPES)
every_width = pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])


def product(left: mx.array, right: mx.array) -> NDArray[np.float64]:
    out: NDArray[np.float64] = exact(left) @ exact(right)
    return out


def gemm_params(
    rows: int, columns: int, depth: int, block: tuple[int, int, int]
) -> NDArray[np.void]:
    """GEMMParams of steel/gemm/params.h, for one product of contiguous matrices, B transposed."""
    params = np.zeros((), PARAMS)
    params["M"], params["N"], params["K"] = rows, columns, depth
    params["lda"] = params["ldb"] = depth
    params["ldd"] = columns
    params["tiles_m"], params["tiles_n"] = -(-rows // block[0]), -(-columns // block[1])
    params["gemm_k_iterations_aligned"] = depth // block[2]
    return params


def run_gemm(name: str, rows: int, columns: int, depth: int, *, check: bool) -> None:
    block = (32, 32, 16)
    a = random(DTYPES[name], rows, depth, seed=1)
    b = random(DTYPES[name], columns, depth, seed=2)
    is_aligned = {
        200 + k: size % of == 0
        for k, (size, of) in enumerate(zip((rows, columns, depth), block, strict=True))
    }
    constants: dict[int, bool | int] = {10: False, 100: False, 110: False, **is_aligned}
    # The second front end has no references from members of a tile to private memory.
    kernel = f"gemm<{name}, 32, 32, 16, 2, 2, false, true, float>"
    run = load(GEMM, kernel, constants, check=check, strict=False)
    params = gemm_params(rows, columns, depth, block)
    out = run(
        {0: a, 1: b, 4: params},
        {3: OutputBuffer((rows, columns), a.dtype)},
        grid=(int(params["tiles_n"]) * SIMD, int(params["tiles_m"]) * 2, 2),
        threadgroup=(SIMD, 2, 2),
    )[3]
    scale = np.sqrt(depth)
    assert_close(out / scale, product(a, b.T) / scale)


@every_dtype
def test_steel_gemm_of_whole_tiles(name: str) -> None:
    run_gemm(name, 64, 32, 48, check=False)


@every_dtype
def test_steel_gemm_of_parts_of_tiles(name: str) -> None:
    run_gemm(name, 45, 39, 57, check=False)


def test_steel_gemm_passes_every_check() -> None:
    run_gemm("half", 45, 39, 57, check=True)


def quantised(name: str, rows: int, columns: int, depth: int, bits: int) -> tuple[mx.array, ...]:
    """Rows, packed weights, scales and biases."""
    x = random(DTYPES[name], rows, depth, seed=3)
    weights = random(mx.float32, columns, depth, seed=4)
    packed, scales, biases = mx.quantize(weights, GROUP_SIZE, bits)
    scales, biases = scales.astype(x.dtype), biases.astype(x.dtype)
    return x, packed, scales, biases


def expected(arrays: tuple[mx.array, ...], bits: int) -> NDArray[np.float64]:
    x, packed, scales, biases = arrays
    scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
    weights = mx.dequantize(packed, scales, biases, GROUP_SIZE, bits)
    return product(x, weights.T)


def without_batch(first: int) -> dict[int, NDArray[np.generic]]:
    """The dimensions, shapes and strides of batches, which are not read."""
    kinds = (np.int32, np.int32, np.int64) * 2 + (np.int64, np.int64)
    return {first + k: np.zeros(1, kind) for k, kind in enumerate(kinds)}


def run_qmv(kernel: str, name: str, bits: int, depth: int, *, check: bool) -> None:
    columns = 24
    arrays = quantised(name, 3, columns, depth, bits)
    x, packed, scales, biases = arrays
    run = load(
        QUANTISED, f"{kernel}<{name}, {GROUP_SIZE}, {bits}, false>", check=check, strict=False
    )
    out = run(
        {
            **dict(enumerate((packed, scales, biases, x))),
            5: scalar(depth, np.int32),
            6: scalar(columns, np.int32),
            **without_batch(7),
        },
        {4: OutputBuffer((3, columns), x.dtype)},
        grid=(3 * SIMD, columns // 8 * 2, 1),
        threadgroup=(SIMD, 2, 1),
    )[4]
    scale = np.sqrt(depth)
    assert_close(out / scale, expected(arrays, bits) / scale)


@every_dtype
def test_a_quantised_vector_product(name: str) -> None:
    run_qmv("affine_qmv", name, 4, 192, check=True)


@every_dtype
def test_a_quantised_vector_product_of_whole_blocks(name: str) -> None:
    run_qmv("affine_qmv_fast", name, 4, 512, check=True)


@every_width
def test_a_quantised_vector_product_of_every_width(bits: int) -> None:
    run_qmv("affine_qmv", "half", bits, 192, check=True)
    run_qmv("affine_qmv_fast", "half", bits, 512, check=True)


def run_qmm(name: str, bits: int, *, check: bool) -> None:
    rows, columns, depth = 37, 40, 128
    arrays = quantised(name, rows, columns, depth, bits)
    x, packed, scales, biases = arrays
    kernel = f"affine_qmm_t<{name}, {GROUP_SIZE}, {bits}, false, false>"
    run = load(QUANTISED, kernel, check=check, strict=False)
    out = run(
        {
            **dict(enumerate((packed, scales, biases, x))),
            5: scalar(depth, np.int32),
            6: scalar(columns, np.int32),
            7: scalar(rows, np.int32),
            **without_batch(8),
        },
        {4: OutputBuffer((rows, columns), x.dtype)},
        grid=(-(-columns // 32) * SIMD, -(-rows // 32) * 2, 2),
        threadgroup=(SIMD, 2, 2),
    )[4]
    scale = np.sqrt(depth)
    assert_close(out / scale, expected(arrays, bits) / scale)


@every_dtype
def test_a_quantised_matrix_product(name: str) -> None:
    run_qmm(name, 4, check=False)


def test_a_quantised_matrix_product_passes_every_check() -> None:
    run_qmm("half", 4, check=True)


@every_width
def test_a_quantised_matrix_product_of_every_width(bits: int) -> None:
    run_qmm("bfloat16_t", bits, check=True)


@every_dtype
def test_a_quantised_product_that_copies_structs(name: str) -> None:
    """The vector times a matrix whose rows are quantised: weights are read as structs."""
    columns, depth = 128, 75
    x = random(DTYPES[name], 2, depth, seed=5)
    packed, scales, biases = mx.quantize(random(mx.float32, depth, columns, seed=6), GROUP_SIZE, 4)
    scales, biases = scales.astype(x.dtype), biases.astype(x.dtype)
    run = load(QUANTISED, f"affine_qvm<{name}, {GROUP_SIZE}, 4, false>", check=True, strict=False)
    out = run(
        {
            **dict(enumerate((packed, scales, biases, x))),
            5: scalar(depth, np.int32),
            6: scalar(columns, np.int32),
            **without_batch(7),
        },
        {4: OutputBuffer((2, columns), x.dtype)},
        grid=(2 * SIMD, columns // 64 * 2, 1),
        threadgroup=(SIMD, 2, 1),
    )[4]
    scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
    weights = mx.dequantize(packed, scales, biases, GROUP_SIZE, 4)
    scale = np.sqrt(depth)
    assert_close(out / scale, product(x, weights) / scale)


@every_dtype
def test_a_vector_product_with_uniform_numbers(name: str) -> None:
    rows, depth = 40, 201
    matrix, vector = (
        random(DTYPES[name], rows, depth, seed=7),
        random(DTYPES[name], depth, 1, seed=8),
    )
    run = load("steel/utils.h gemv.h", f"gemv<{name}, 4, 1, 1, 32, 4, 4, false, false>")
    integers = {4: depth, 5: rows, 6: depth, 9: 1, 14: 1}
    no_batch = np.zeros(1, np.int64)
    out = run(
        {
            0: matrix,
            1: vector,
            2: vector,  # in place of a bias
            **{index: scalar(value, np.int32) for index, value in integers.items()},
            7: scalar(1, np.float32),
            8: scalar(0, np.float32),
            10: np.ones(1, np.int32),
            **dict.fromkeys((11, 12, 13), no_batch),
        },
        {3: OutputBuffer((rows, 1), matrix.dtype)},
        grid=(-(-rows // 16) * SIMD, 1, 4),
        threadgroup=(SIMD, 1, 4),
    )[3]
    scale = np.sqrt(depth)
    assert_close(out / scale, product(matrix, vector) / scale)

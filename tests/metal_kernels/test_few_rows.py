"""Products of two to five rows equal MLX's products of each row alone, bit by bit."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from metal_kernels import few_rows
from metal_kernels.few_rows import PACKS, ROWS, FewRows, as_quantised, one_by_one
from metal_kernels.kernels import Kernel, Kernels, KernelSpec
from metal_kernels.metal import MetalBackend
from metal_kernels.reading import read
from tests.emulated import emulated_factory
from tests.emulator import MetalKernel
from tests.metal_kernels.mlx_products import packs_of, quantised, random_rows, rows_alone

# Whole blocks of two words a lane, and of one; lanes without numbers at the end of a row.
WIDTHS = (512, 256, 384, 640)
PLAIN = (512, 4, 64, mx.bfloat16)
SLOW, LONG = pytest.mark.slow, pytest.mark.long
EVERY = [
    pytest.param(width, bits, group_size, dtype, marks=SLOW if dtype == mx.bfloat16 else LONG)
    for width in WIDTHS
    for bits in (4, 8)
    for group_size in (32, 64, 128)
    for dtype in (mx.bfloat16, mx.float16, mx.float32)
    if (width, bits, group_size, dtype) != PLAIN
]


def same_bits(first: mx.array, second: mx.array) -> bool:
    assert first.dtype == second.dtype
    bits = mx.uint32 if first.dtype == mx.float32 else mx.uint16
    return bool(read(mx.array_equal(first.view(bits), second.view(bits))))


@pytest.mark.parametrize(("width", "bits", "group_size", "dtype"), [PLAIN, *EVERY])
def test_a_row_equals_mlx_product_of_it_alone(
    width: int, bits: int, group_size: int, dtype: mx.Dtype
) -> None:
    weights = quantised(16, width, bits, group_size, dtype)
    rows = random_rows(5, weights)
    kernel = FewRows(Kernels(emulated_factory()))
    found = kernel.product(rows, weights, packs_of(weights))
    assert same_bits(found, rows_alone(rows, weights))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "bits", "packs"),
    [
        (2, 8, 1),
        *(
            pytest.param(count, bits, packs, marks=pytest.mark.slow)
            for count in ROWS
            for bits in (4, 8)
            for packs in PACKS
        ),
    ],
)
def test_products_are_right_and_pass_every_check(
    count: int, bits: int, packs: int, checked_backend: MetalBackend
) -> None:
    """In float32, where the specification on any machine differs by rounding alone."""
    weights = quantised(24, 416, bits, 32, mx.float32)
    rows = random_rows(count, weights)
    found = read(checked_backend.few_rows.product(rows, weights, packs))
    expected = read(one_by_one(rows, weights))
    assert np.abs(found - expected).max() <= 2e-6 * np.abs(expected).max() * 416**0.5


@pytest.mark.slow
def test_the_order_of_sums_is_seen_in_float32() -> None:
    """So a trial tells the two orders of MLX's kernels apart."""
    weights = quantised(16, 512, 4, 64, mx.float32)
    rows = random_rows(5, weights)
    kernel = FewRows(Kernels(emulated_factory()))
    first, second = (kernel.product(rows, weights, packs) for packs in PACKS)
    assert not same_bits(first, second)


def test_rows_keep_their_shape_and_others_are_refused() -> None:
    kernel = FewRows(Kernels(lambda *_: lambda **call: [mx.zeros(call["output_shapes"][0])]))
    weights = quantised(8, 256, 4, 32, mx.float16)
    for shape in ((2, 1, 256), (1, 5, 256), (3, 256)):
        found = kernel.product(mx.zeros(shape, mx.float16), weights, 1)
        assert found.shape == (*shape[:-1], 8)
    for rows in (
        mx.zeros((1, 256), mx.float16),
        mx.zeros((6, 256), mx.float16),
        mx.zeros((2, 128), mx.float16),
        mx.zeros((2, 256), mx.float32),
    ):
        with pytest.raises(ValueError, match="do not belong to weights of width 256"):
            kernel.product(rows, weights, 1)


@pytest.mark.parametrize(
    ("columns", "width", "bits", "group_size", "why"),
    [
        (8, 256, 4, 64, None),
        (8, 256, 8, 32, None),
        (8, 256, 6, 64, "6 bits"),
        (8, 256, 2, 64, "2 bits"),
        (12, 256, 4, 64, "12 results"),
        (8, 128, 4, 64, "shape"),  # MLX has another kernel for these
    ],
)
def test_weights_that_are_not_taken(
    columns: int, width: int, bits: int, group_size: int, why: str | None
) -> None:
    found = few_rows.refusal(quantised(columns, width, bits, group_size, mx.bfloat16))
    assert (found is None) == (why is None)
    assert why is None or why in str(found)


def test_scales_of_another_dtype_are_not_taken() -> None:
    weights = quantised(8, 256, 4, 64, mx.bfloat16)
    assert few_rows.refusal(weights.astype(mx.float32)) is None
    assert few_rows.refusal(weights.astype(mx.int32)) is not None


def test_only_the_affine_mode_is_taken() -> None:
    packed, scales = mx.quantize(mx.zeros((8, 256)), group_size=32, bits=4, mode="mxfp4")
    assert as_quantised(packed, scales, None, 32, 4, "mxfp4") is None
    weights = quantised(8, 256, 4, 64, mx.bfloat16)
    arrays = weights.weights, weights.scales, weights.biases
    assert as_quantised(*arrays, 64, 4, "affine") is not None


@pytest.mark.slow
def test_five_rows_take_fewer_instructions_than_five_products() -> None:
    """Weights and scales are loaded once for all rows."""

    def counted(count: int) -> float:
        made: list[Kernel] = []

        def factory(spec: KernelSpec, source: str) -> Kernel:
            made.append(emulated_factory(count=True)(spec, source))
            return made[-1]

        weights = quantised(16, 1024, 4, 64, mx.float16)
        FewRows(Kernels(factory)).product(random_rows(count, weights), weights, 2)
        (kernel,) = made
        assert isinstance(kernel, MetalKernel)
        assert kernel.statistics is not None
        return kernel.statistics.num_instructions

    two, five = counted(2), counted(5)
    for_a_row = (five - two) / 3
    for_weights = two - 2 * for_a_row
    assert five < 0.6 * 5 * (for_a_row + for_weights)

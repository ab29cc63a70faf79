"""Every kind of block gives the values that llama.cpp's own dequantiser gives."""

from __future__ import annotations

import gguf
import mlx.core as mx
import numpy as np
import pytest
from gguf.quants import dequantize

from mlxserve.gguf.blocks import GROUP_SIZE, INEXACT, REPACKINGS
from tests.gguf.random_files import SCALES, random_blocks

EXACT = [kind for kind in REPACKINGS if kind not in INEXACT]
PRODUCTS = ("Q4_K", "Q5_K", "IQ4_XS")  # whose scales are products of two numbers
TWO_SCALES = ("Q3_K", "Q6_K")  # which share one of mlx's


def repacked(kind: str, raw: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    num_values, _ = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    codes = np.empty((len(raw), num_values * REPACKINGS[kind].bits // 8), np.uint8)
    scales, biases = REPACKINGS[kind].repack(raw, codes)
    return codes, scales, biases


def values(kind: str, raw: np.ndarray, dtype: mx.Dtype) -> np.ndarray:
    how = REPACKINGS[kind]
    codes, scales, biases = repacked(kind, raw)
    found = mx.dequantize(
        mx.array(np.ascontiguousarray(codes).view(np.uint32)),
        mx.array(scales) if biases is None else mx.array(scales).astype(dtype),
        None if biases is None else mx.array(biases).astype(dtype),
        group_size=GROUP_SIZE,
        bits=how.bits,
        mode=how.mode,
    )
    return np.array(found.astype(mx.float32))


def test_random_blocks_have_the_values_of_llama_cpp() -> None:
    for kind in EXACT:
        raw = random_blocks(kind)
        expected = dequantize(raw, gguf.GGMLQuantizationType[kind])
        assert np.array_equal(values(kind, raw, mx.float32), expected), kind


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize("kind", sorted(INEXACT))
def test_blocks_with_groups_of_16_are_half_a_percent_off(kind: str, dtype: mx.Dtype) -> None:
    raw = random_blocks(kind)
    expected = dequantize(raw, gguf.GGMLQuantizationType[kind])
    error = values(kind, raw, dtype) - expected
    # mlx dequantises in the dtype of the scales.
    rounding = {mx.float32: 0.0, mx.float16: 2**-11, mx.bfloat16: 2**-8}[dtype]
    assert np.sqrt((error**2).mean() / (expected**2).mean()) < 0.005 + rounding


def test_scales_of_what_has_offsets_are_exact_in_16_bits() -> None:
    _, scales, biases = repacked("Q2_K", random_blocks("Q2_K"))
    for one in (mx.array(scales), mx.array(biases)):
        assert mx.array_equal(one, one.astype(mx.bfloat16).astype(mx.float32))


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize("kind", TWO_SCALES)
def test_the_bias_is_the_middle_of_the_codes_in_every_dtype(kind: str, dtype: mx.Dtype) -> None:
    _, scales, biases = repacked(kind, random_blocks(kind))
    assert biases is not None
    is_normal = np.abs(scales) >= 2.0**-14  # where float16 has all of its bits
    found = [mx.array(one[is_normal]).astype(dtype) for one in (scales, biases)]
    assert mx.array_equal(-128 * found[0], found[1])


@pytest.mark.parametrize("kind", TWO_SCALES)
def test_one_of_two_groups_keeps_its_values_and_the_other_is_half_a_step_off(kind: str) -> None:
    raw = random_blocks(kind)
    expected = dequantize(raw, gguf.GGMLQuantizationType[kind]).reshape(-1, 2, 16)
    errors = np.abs(values(kind, raw, mx.float32).reshape(-1, 2, 16) - expected).max(axis=2)
    _, scales, _ = repacked(kind, raw)
    step = np.abs(scales.reshape(-1, 1))
    assert (errors.min(axis=1, keepdims=True) <= 1e-4 * step).all()
    # A whole step where the other group's scale has the other sign and is almost as large.
    assert (errors <= 0.57 * step).mean() > 0.98
    assert (errors <= 1.01 * step).all()


@pytest.mark.parametrize("kind", TWO_SCALES)
def test_two_groups_of_opposite_scales_stay_within_8_bits(kind: str) -> None:
    """The lowest code under the scale of the other sign would be 256."""
    _, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    raw = np.zeros((1, nbytes), np.uint8)
    raw[:, SCALES[kind][0] :][:, :2] = np.array([1.0], np.float16).view(np.uint8)
    if kind == "Q6_K":
        raw[0, 192:208] = np.array([10, -10] * 8, np.int8).view(np.uint8)
    else:  # 42 - 32 and 22 - 32
        raw[0, 96:104] = [42 & 15 | (42 & 15) << 4, 22 & 15 | (22 & 15) << 4] * 4
        raw[0, 104:108] = [0b10101010, 0b01010101] * 2
    expected = dequantize(raw, gguf.GGMLQuantizationType[kind])
    assert (np.sign(expected).reshape(-1, 2, 16)[:, :, 0] == [-1, 1]).all()
    np.testing.assert_allclose(values(kind, raw, mx.float32), expected, rtol=0.008)


@pytest.mark.parametrize("kind", sorted(INEXACT))
def test_blocks_of_equal_values_are_exact(kind: str) -> None:
    """A block whose scales are all zero."""
    _, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    raw = np.zeros((4, nbytes), np.uint8)
    assert not values(kind, raw, mx.float32).any()


def test_scales_that_are_float16_in_the_file_stay_exact_in_float16() -> None:
    for kind in [kind for kind in EXACT if kind not in PRODUCTS]:
        _, scales, biases = repacked(kind, random_blocks(kind))
        for one in (scales, biases):
            assert one is None or np.array_equal(one, one.astype(np.float16).astype(np.float32)), (
                kind
            )


@pytest.mark.parametrize("kind", PRODUCTS)
def test_products_of_scales_lose_one_bit_in_2048_in_float16(kind: str) -> None:
    _, scales, biases = repacked(kind, random_blocks(kind))
    for one in (scales, biases):
        assert one is not None
        error = np.abs(one - one.astype(np.float16).astype(np.float32))
        assert (error <= np.abs(one) / 2048).all()

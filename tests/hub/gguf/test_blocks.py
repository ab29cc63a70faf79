"""Every kind of block gives the values that llama.cpp's own dequantiser gives."""

from __future__ import annotations

import gguf
import mlx.core as mx
import numpy as np
import pytest
from gguf.quants import dequantize

from mlxserve.hub.gguf.blocks import GROUP_SIZE, INEXACT, REPACKINGS
from mlxserve.hub.gguf.scales import write_scales
from tests.hub.gguf.random_files import SCALES, random_blocks

EXACT = [kind for kind in REPACKINGS if kind not in INEXACT]
PRODUCTS = (
    "Q4_K",
    "Q5_K",
    "IQ4_XS",
    "IQ1_S",
    "IQ2_XXS",
    "IQ3_XXS",
    "IQ3_S",
)  # whose scales are products of two numbers
GROUPS_OF_16 = ("Q2_K", "Q3_K", "Q6_K")
ONE_ZERO = [kind for kind, how in REPACKINGS.items() if how.zero]


def repacked(
    kind: str, raw: np.ndarray, dtype: type[np.floating] = np.float32
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    how = REPACKINGS[kind]
    num_values, _ = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    codes = np.empty((len(raw), num_values * how.bits // 8), np.uint8)
    size = (len(raw), num_values // GROUP_SIZE)
    is_affine = how.mode == "affine"
    scales = np.empty(size, dtype if is_affine else np.uint8)
    biases = np.empty(size, dtype) if is_affine else None
    write_scales(how.repack(raw, codes), how.zero, scales, biases)
    return codes, scales, biases


def values(kind: str, raw: np.ndarray, dtype: mx.Dtype) -> np.ndarray:
    how = REPACKINGS[kind]
    codes, scales, biases = repacked(kind, raw, np.float16 if dtype == mx.float16 else np.float32)
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
    assert np.sqrt((error**2).mean() / (expected**2).mean()) < 0.006 + rounding


def test_differences_in_groups_of_q2_k_are_exact_and_one_offset_of_two_is_half_a_step_off() -> None:
    raw = random_blocks("Q2_K")
    # Offsets of more than 200 steps leave no whole steps; no quantiser writes such.
    halves = raw[:, 80:84].view(np.float16).astype(np.float32)
    raw = raw[np.abs(halves[:, 1]) < 10 * np.abs(halves[:, 0])]
    assert len(raw) > 400
    expected = dequantize(raw, gguf.GGMLQuantizationType["Q2_K"]).reshape(-1, 2, 16)
    found = values("Q2_K", raw, mx.float32).reshape(-1, 2, 16)
    step = np.abs(repacked("Q2_K", raw)[1].reshape(-1, 1, 1))
    lowest = expected.argmin(axis=2, keepdims=True)
    offset = [np.take_along_axis(one, lowest, 2) for one in (expected, found)]
    assert (np.abs((found - offset[1]) - (expected - offset[0])) < 1e-3 * step).all()
    errors = np.abs(offset[1] - offset[0])
    assert (errors <= 0.501 * step).all()
    assert (errors.min(axis=1, keepdims=True) <= 1e-3 * step).all()


def test_blocks_of_q2_k_whose_scale_is_0_keep_their_offsets() -> None:
    raw = random_blocks("Q2_K")
    raw[:, 80:82] = 0
    expected = dequantize(raw, gguf.GGMLQuantizationType["Q2_K"]).reshape(-1, 2, 16)
    assert expected.any()
    errors = np.abs(values("Q2_K", raw, mx.float32).reshape(-1, 2, 16) - expected).max(axis=2)
    step = np.abs(repacked("Q2_K", raw)[1].reshape(-1, 1))
    assert (errors <= 0.501 * step).all()
    assert (errors.min(axis=1) == 0).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float16], ids=["float32", "float16"])
@pytest.mark.parametrize("kind", ONE_ZERO)
def test_the_bias_is_what_makes_one_code_0_in_every_dtype(
    kind: str, dtype: type[np.floating]
) -> None:
    _, scales, biases = repacked(kind, random_blocks(kind), dtype)
    assert biases is not None
    assert np.array_equal(-REPACKINGS[kind].zero * scales.astype(np.float32), biases)


def test_the_larger_of_two_groups_keeps_its_values_and_the_other_is_half_a_step_off() -> None:
    raw = random_blocks("Q6_K")
    expected = dequantize(raw, gguf.GGMLQuantizationType["Q6_K"]).reshape(-1, 2, 16)
    errors = np.abs(values("Q6_K", raw, mx.float32).reshape(-1, 2, 16) - expected).max(axis=2)
    step = np.abs(repacked("Q6_K", raw)[1].reshape(-1, 1))
    assert (errors.min(axis=1, keepdims=True) <= 1e-4 * step).all()
    # A whole step where the other group's scale has the other sign and is almost as large.
    assert (errors <= 0.57 * step).mean() > 0.98
    assert (errors <= 1.01 * step).all()


@pytest.mark.parametrize("kind", ["Q3_K", "Q6_K"])
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


@pytest.mark.parametrize("kind", GROUPS_OF_16)
def test_blocks_of_equal_values_are_exact(kind: str) -> None:
    """A block whose scales are all zero."""
    _, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    raw = np.zeros((4, nbytes), np.uint8)
    assert not values(kind, raw, mx.float32).any()


def test_scales_that_are_float16_in_the_file_stay_exact_in_float16() -> None:
    for kind in [kind for kind in EXACT if kind not in PRODUCTS]:
        raw = random_blocks(kind)
        found = zip(repacked(kind, raw)[1:], repacked(kind, raw, np.float16)[1:], strict=True)
        for one, kept in found:
            assert one is None or (kept is not None and np.array_equal(one, kept)), kind


@pytest.mark.parametrize("kind", PRODUCTS)
def test_products_of_scales_lose_one_bit_in_2048_in_float16(kind: str) -> None:
    raw = random_blocks(kind)
    exact = repacked(kind, raw)[1:]
    # Where float16 has all of its bits; biases of a small scale are a multiple of its error.
    is_whole = np.abs(exact[0]) >= 2.0**-14
    for one, kept in zip(exact, repacked(kind, raw, np.float16)[1:], strict=True):
        assert one is not None
        is_large = is_whole & (np.abs(one) >= 2.0**-14)
        assert (np.abs(one - kept) <= np.abs(one) / 2048)[is_large].all()

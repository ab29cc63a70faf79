"""Every kind of block gives the values that llama.cpp's own dequantiser gives."""

from __future__ import annotations

import gguf
import mlx.core as mx
import numpy as np
import pytest
from gguf.quants import dequantize

from mlxserve.gguf.blocks import GROUP_SIZE, REPACKINGS

SCALES = {"Q4_0": 1, "Q5_0": 1, "Q8_0": 1}  # float16 numbers at the start of a block; others: 2


def random_blocks(kind: str, count: int = 512) -> np.ndarray:
    """Random bytes, but for the scales, which are finite."""
    draw = np.random.default_rng(11)
    _, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    raw = draw.integers(0, 256, (count, nbytes), dtype=np.uint8)
    for number in range(SCALES.get(kind, 2)):
        scale = draw.normal(scale=0.1, size=(count, 1)).astype(np.float16)
        raw[:, 2 * number : 2 * number + 2] = scale.view(np.uint8)
    return raw


def values(kind: str, raw: np.ndarray, dtype: mx.Dtype) -> np.ndarray:
    how = REPACKINGS[kind]
    codes, scales, biases = how.repack(raw)
    words = mx.array(np.ascontiguousarray(codes).view(np.uint32))
    scales, biases = (mx.array(one).astype(dtype) for one in (scales, biases))
    found = mx.dequantize(words, scales, biases, group_size=GROUP_SIZE, bits=how.bits)
    return np.array(found.astype(mx.float32))


@pytest.mark.parametrize("kind", REPACKINGS)
def test_random_blocks_have_the_values_of_llama_cpp(kind: str) -> None:
    raw = random_blocks(kind)
    expected = dequantize(raw, gguf.GGMLQuantizationType[kind])
    assert np.array_equal(values(kind, raw, mx.float32), expected)


@pytest.mark.parametrize("kind", [kind for kind in REPACKINGS if not kind.endswith("_K")])
def test_scales_that_are_float16_in_the_file_stay_exact_in_float16(kind: str) -> None:
    _, scales, biases = REPACKINGS[kind].repack(random_blocks(kind))
    for one in (scales, biases):
        assert np.array_equal(one, one.astype(np.float16).astype(np.float32))


@pytest.mark.parametrize("kind", [kind for kind in REPACKINGS if kind.endswith("_K")])
def test_products_of_scales_lose_one_bit_in_2048_in_float16(kind: str) -> None:
    _, scales, biases = REPACKINGS[kind].repack(random_blocks(kind))
    for one in (scales, biases):
        error = np.abs(one - one.astype(np.float16).astype(np.float32))
        assert (error <= np.abs(one) / 2048).all()

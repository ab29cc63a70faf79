"""In 16 bits a model sees only if rows of the image, and rows after it, are as near as those before it."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlxserve.hub.files import find_model
from mlxserve.model.attention import load_probed
from mlxserve.model.image_probe import Sample, refuse_others
from tests.images.test_picture import picture
from tests.model.small_vision import IN_16_BITS, write_vision_model

SAMPLE = Sample([*range(12)], picture(5, 6), [*range(12)])
NUM_ROWS = len(SAMPLE.ids)
IMAGE = slice(12, NUM_ROWS - 12)
AFTER = slice(NUM_ROWS - 12, NUM_ROWS)


def logits(seed: int) -> np.ndarray:
    return np.random.RandomState(seed).randn(NUM_ROWS, 64)


def rounded(noise: float) -> np.ndarray:
    """The logits of seed 0, each row a little off."""
    return logits(0) + noise * logits(1)


def check(paged: np.ndarray, dtype: mx.Dtype = mx.bfloat16) -> None:
    refuse_others(logits(0), paged, SAMPLE, dtype)


@pytest.mark.parametrize("noise", [0.0, 1e-3, 1e-2, 5e-2])
def test_rounding_is_no_difference(noise: float) -> None:
    check(rounded(noise))


@pytest.mark.parametrize("rows", [IMAGE, AFTER])
@pytest.mark.parametrize("noise", [1e-3, 1e-2])
def test_rows_that_differ_more_than_those_before_the_image_are_found(
    noise: float, rows: slice
) -> None:
    paged = rounded(noise)
    paged[rows] += 0.1 * logits(2)[rows]
    with pytest.raises(ValueError, match="beside an image are not mlx-vlm's"):
        check(paged)


def test_other_experts_in_few_rows_are_no_difference() -> None:
    paged = rounded(1e-2)
    paged[[14, 20, NUM_ROWS - 1]] = logits(2)[[14, 20, NUM_ROWS - 1]]
    check(paged)
    with pytest.raises(ValueError, match="not mlx-vlm's"):
        check(paged, mx.float32)


def test_what_is_no_number_is_found() -> None:
    paged = rounded(1e-2)
    paged[20, 3] = np.nan
    for dtype in (mx.bfloat16, mx.float32):
        with pytest.raises(ValueError, match="not mlx-vlm's"):
            check(paged, dtype)


def test_in_32_bits_every_row_must_agree() -> None:
    check(rounded(1e-5), mx.float32)
    with pytest.raises(ValueError, match="not mlx-vlm's"):
        check(rounded(1e-2), mx.float32)


@pytest.fixture(scope="module")
def in_16_bits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_in_16_bits(tmp_path_factory.mktemp("qwen3_vl"), "qwen3_vl")


def write_in_16_bits(at: Path, kind: str) -> Path:
    folder = write_vision_model(at, kind)
    file = str(folder / "model.safetensors")
    arrays = {name: array.astype(mx.bfloat16) for name, array in mx.load(file).items()}
    mx.eval(arrays)
    mx.save_safetensors(file, arrays, metadata={"format": "mlx"})
    return folder


@pytest.mark.slow
def test_a_model_in_16_bits_sees(in_16_bits: Path) -> None:
    choice = load_probed(
        find_model(str(in_16_bits)),
        is_metal=True,  # weights as they are stored
        memory_limit=1 << 32,
        kv_cache_dtype="auto",
        attention_backend="cpu",
    )
    assert choice.loaded.dtype == mx.bfloat16
    assert choice.loaded.vision is not None, choice.loaded.no_vision_reason


_SLOW = {"gemma4", "qwen3_5"}  # embeddings that are multiplied, and recurrent layers


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=pytest.mark.slow if kind in _SLOW else pytest.mark.long)
        for kind in IN_16_BITS
        if kind != "qwen3_vl"
    ],
)
def test_every_other_family_sees_in_16_bits(kind: str, tmp_path: Path) -> None:
    test_a_model_in_16_bits_sees(write_in_16_bits(tmp_path, kind))

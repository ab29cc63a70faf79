"""What a tower needs for the largest image follows from two small ones."""

from __future__ import annotations

import gc
from pathlib import Path

import mlx.core as mx
import pytest

from mlxserve.hub.files import find_model
from mlxserve.model.attention import load_probed
from mlxserve.model.image_encoder_memory import TowerMemory
from mlxserve.model.load import LoadedModel
from mlxserve.model.vision import Vision
from tests.model.small_vision import image, write_vision_model


def test_activations_grow_with_the_image_and_a_mask_with_its_square() -> None:
    memory = TowerMemory.fit((100, 100 * 7 + 100 * 100 * 2), (300, 300 * 7 + 300 * 300 * 2))
    assert (memory.each, memory.pair) == (7, 2)
    assert memory.nbytes(1_000) == 1.25 * (7_000 + 2_000_000)
    assert memory.nbytes(memory.max_inputs(10_000_000)) == pytest.approx(10_000_000, rel=0.01)


def test_what_does_not_grow_with_the_image_is_not_expected_to_shrink() -> None:
    memory = TowerMemory.fit((100, 1_000), (200, 1_400))
    assert (memory.each, memory.pair) == (7, 0)
    assert memory.max_inputs(memory.nbytes(1_000)) == pytest.approx(1_000, abs=1)


def test_images_of_one_size_need_what_was_measured() -> None:
    memory = TowerMemory.fit((100, 1_000), (100, 1_200))
    assert memory.nbytes(100) == 1.25 * 1_200


def _loaded(folder: Path, memory_limit: int) -> LoadedModel:
    return load_probed(
        find_model(str(folder)),
        is_metal=False,
        memory_limit=memory_limit,
        kv_cache_dtype="auto",
        attention_backend="auto",
    ).loaded


def test_no_image_takes_more_than_is_planned(tmp_path: Path) -> None:
    """The model's processor takes up to 50,176 pixels."""
    vision = _loaded(write_vision_model(tmp_path, "qwen3_vl"), 1 << 32).vision
    assert isinstance(vision, Vision)
    picture = vision.reader.read(image(1, 1_000, 1_000))
    gc.collect()  # what earlier tests left
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    vision.see(picture)
    assert 0 < mx.get_peak_memory() - before <= vision.planned_nbytes(0)

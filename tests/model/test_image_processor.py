"""Images are read for each key anew, and small ones never wait for large ones."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mlxserve.images.image import Image
from mlxserve.model.image_processor import ImageProcessor

ROW = 9


class Processor:
    """Two rows for each image, and a large one does not end before it may."""

    image_token = "<image>"
    tokenizer = SimpleNamespace(convert_tokens_to_ids=lambda _text: ROW)

    def __init__(self) -> None:
        self.num_read = 0
        self.has_begun, self.may_end = threading.Event(), threading.Event()

    def __call__(self, *, text: list[str], images: list[Any], **_: Any) -> dict[str, Any]:
        self.num_read += 1
        [image] = images
        if image.width > 1_000:
            self.has_begun.set()
            assert self.may_end.wait(60)
        return {
            "input_ids": np.array([[5, ROW, ROW]]),
            "pixel_values": np.full((1, 4), image.width, np.float32),
            "text": np.zeros(len(text)),
        }


@pytest.fixture
def processor() -> Iterator[Processor]:
    processor = Processor()
    yield processor
    processor.may_end.set()


def image(side: int, owner: str = "") -> Image:
    return Image.from_pixels(np.zeros((side, side, 3), np.uint8), owner)


def test_an_image_of_another_key_is_read_as_if_it_were_new(processor: Processor) -> None:
    reader = ImageProcessor(processor, ROW, has_grid=False)
    good, again, evil = (reader.read(image(8, owner)) for owner in ("good", "good", "evil"))
    assert processor.num_read == 2
    assert again is good
    assert good.key != evil.key


def test_a_small_image_does_not_wait_for_a_large_one(processor: Processor) -> None:
    reader = ImageProcessor(processor, ROW, has_grid=False)
    large = threading.Thread(target=reader.read, args=[image(2_000)])
    large.start()
    assert processor.has_begun.wait(60)
    assert reader.read(image(8)).num_rows == 2
    assert large.is_alive()
    processor.may_end.set()
    large.join(60)

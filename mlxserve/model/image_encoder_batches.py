"""Tests at load time whether the image encoder computes a batch as it computes single images."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import mlx.core as mx
import numpy as np

from metal_kernels.reading import read
from mlxserve.images.image import Image
from mlxserve.model.image_encoder import MAX_TOGETHER, Tower
from mlxserve.model.image_processor import ImageProcessor
from mlxserve.model.picture_batch import axes_of
from mlxserve.model.probe import TOLERANCES, relative
from mlxserve.model.shown_pictures import Features

log = logging.getLogger("mlxserve.vision")

_SIZE = (48, 64)
_ERRORS = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError)


def probed_axes(tower: Tower, reader: ImageProcessor, dtype: mx.Dtype) -> Mapping[str, int] | None:
    """Axes on which the inputs of several images are joined; None to compute each separately."""
    try:
        # A processor may make every image large: then few of them, or none, will be computed at once.
        max_together = tower.max_inputs // reader.make(_image(0)).num_inputs
        images = [_image(seed) for seed in range(min(MAX_TOGETHER, max_together))]
        if len(images) < 2:
            return None
        pictures = [reader.make(image) for image in images]
        axes = axes_of([picture.inputs for picture in pictures], reader.inputs_of(images))
        if axes is None:
            log.info("The processor joins images in a way of its own: they are computed one by one")
            return None
        alone = [tower.features([picture])[0][0] for picture in pictures]
        tower.axes = axes
        apart = max(map(_apart, tower.features(pictures)[0], alone))
    except _ERRORS as error:
        log.info("The vision tower takes one image at a time", exc_info=error)
        return None
    finally:
        tower.axes = None
    if not apart <= TOLERANCES.get(dtype, 1e-1):
        log.info("Images that the vision tower computes at once differ by %.1e", apart)
        return None
    return axes


def _image(seed: int) -> Image:
    pixels = np.random.RandomState(seed).randint(0, 256, (*_SIZE, 3))
    return Image.from_pixels(pixels.astype(np.uint8))


def _apart(actual: Features, expected: Features) -> float:
    """The largest difference relative to the largest number; NaN if any number is."""
    pairs = zip((actual.rows, *actual.deep), (expected.rows, *expected.deep), strict=True)
    return float(np.max([relative(*map(_numbers, pair)).max() for pair in pairs]))


def _numbers(array: mx.array) -> np.ndarray:
    return read(array.astype(mx.float32))

"""TowerMemory: extrapolates the encoder's memory for the largest image from two small ones.

A layer's activations grow with the image, and with the square of it where a model gives its
attention a mask. The largest image would take seconds at each start, and gigabytes: so small ones
are computed, large ones are only read by the processor, and images that would need more than a
share of the memory are made smaller first.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from mlxserve.images.image import MAX_PIXELS, Image
from mlxserve.images.picture import Picture
from mlxserve.model.image_encoder import Tower, compute
from mlxserve.model.image_processor import ImageProcessor

log = logging.getLogger("mlxserve.vision")

_SMALL, _LARGER = 64, 224  # sides of the images that are computed
_MEDIUM, _LARGE = 1024, 2048  # pixels of the measured images, then of the read ones
# A processor makes larger images smaller where the larger one has no more than this.
_GROWS = 1.5
_SHARE = 8  # one part of the memory is for the encoder's step
_FEWEST_PIXELS = 1 << 20
# Numbers of images that are computed at once: a larger one keeps the device busy by itself.
_MAX_INPUTS = 2 << 20
_MARGIN = 1.25  # as in `step_peak`


@dataclass(frozen=True, slots=True)
class TowerMemory:
    """Bytes as a function of an image's input numbers: linear and quadratic terms."""

    each: float
    pair: float

    @classmethod
    def fit(cls, small: tuple[int, int], larger: tuple[int, int]) -> TowerMemory:
        """Fit two measurements of (numbers, bytes)."""
        (few, few_bytes), (many, many_bytes) = small, larger
        if many <= few:
            return cls(max(few_bytes / few, many_bytes / many), 0.0)
        pair = max(0.0, (many_bytes / many - few_bytes / few) / (many - few))
        return cls(many_bytes / many - pair * many, pair)

    def nbytes(self, num_inputs: int) -> int:
        return int(_MARGIN * num_inputs * (self.each + self.pair * num_inputs))

    def max_inputs(self, nbytes: int) -> int:
        """The highest count of input numbers that fits `nbytes`."""
        wanted = nbytes / _MARGIN
        if self.pair == 0:
            return int(wanted / max(self.each, 1e-9))
        root = math.sqrt(self.each**2 + 4 * self.pair * wanted)
        return int((root - self.each) / (2 * self.pair))


def plan_tower(tower: Tower, reader: ImageProcessor, memory_limit: int) -> int:
    """Plan the encoder's memory, and return the bytes it needs besides its weights.

    Makes the reader shrink images that would take more than a share of `memory_limit`, and the
    encoder compute no more than that at once.
    """
    small, larger = (_measured(tower, reader.make(_blank(side))) for side in (_SMALL, _LARGER))
    memory = TowerMemory.fit(small, larger)
    medium, large = (reader.make(_blank(side)).num_inputs for side in (_MEDIUM, _LARGE))
    max_inputs = large
    if large > _GROWS * medium:
        max_inputs = large * MAX_PIXELS // _LARGE**2
        fewest = large * _FEWEST_PIXELS // _LARGE**2
        affordable = max(fewest, memory.max_inputs(memory_limit // _SHARE))
        if affordable < max_inputs:
            reader.max_pixels = MAX_PIXELS * affordable // max_inputs
            max_inputs = affordable
    affordable = max(max_inputs, memory.max_inputs(memory_limit // _SHARE))
    tower.max_inputs = min(affordable, _MAX_INPUTS)
    planned = memory.nbytes(max(max_inputs, tower.max_inputs))
    log.info(
        "The vision tower needs up to %.2f GiB for an image of %.1f million pixels",
        planned / (1 << 30),
        (reader.max_pixels or MAX_PIXELS) / (1 << 20),
    )
    return planned


def _blank(side: int) -> Image:
    return Image.from_pixels(np.zeros((side, side, 3), np.uint8))


def _measured(tower: Tower, picture: Picture) -> tuple[int, int]:
    """(input numbers, peak bytes while the encoder computes them)."""
    mx.synchronize()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    for _ in compute(tower, [picture]):
        pass
    return picture.num_inputs, max(0, mx.get_peak_memory() - before)

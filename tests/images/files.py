"""Small files of images."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from PIL import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")


def file_of(image: Any, file_format: str = "PNG", **options: Any) -> bytes:
    """A PIL image as the bytes of a file."""
    file = io.BytesIO()
    image.save(file, file_format, **options)
    return file.getvalue()


def picture(width: int = 24, height: int = 16, seed: int = 0) -> Any:
    """Of random pixels."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)

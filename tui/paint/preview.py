"""Paints a picture in the terminal: two pixels in each cell, one above the other."""

from __future__ import annotations

import io
from functools import lru_cache

from rich.color import Color
from rich.segment import Segment
from rich.style import Style
from textual.strip import Strip

MAX_WIDTH, MAX_HEIGHT = 32, 10  # cells
_MAX_PIXELS = 64 << 20  # pixels of a decoded picture
_UPPER_HALF = "▀"


@lru_cache(maxsize=64)
def preview(content: bytes, width: int) -> tuple[Strip, ...]:
    """Paint lines of at most `width` cells; empty without Pillow or for an unreadable file."""
    pixels = _pixels(content, max(1, min(width, MAX_WIDTH)))
    return tuple(
        _line(above, below) for above, below in zip(pixels[::2], pixels[1::2], strict=True)
    )


def _pixels(content: bytes, width: int) -> list[list[tuple[int, int, int]]]:
    """Return rows of colours, an even number of them."""
    try:
        from PIL import Image, ImageOps
    except ImportError:
        return []
    try:
        image = Image.open(io.BytesIO(content), formats=("PNG", "JPEG", "WEBP", "GIF"))
        if image.width * image.height > _MAX_PIXELS:
            return []
        image.draft(None, (8 * width, 8 * width))
        image.thumbnail((8 * width, 8 * width))
        small = ImageOps.exif_transpose(image).convert("RGB")
        small.thumbnail((width, 2 * MAX_HEIGHT))
        whole = small.resize((small.width, small.height + small.height % 2))
    except Exception:  # noqa: BLE001  (decoders raise anything; the name of the file is shown in any case)
        return []
    data = whole.tobytes()
    colours = list(zip(data[::3], data[1::3], data[2::3], strict=True))
    return [colours[at : at + whole.width] for at in range(0, len(colours), whole.width)]


def _line(above: list[tuple[int, int, int]], below: list[tuple[int, int, int]]) -> Strip:
    return Strip(
        [
            Segment(
                _UPPER_HALF, Style(color=Color.from_rgb(*upper), bgcolor=Color.from_rgb(*lower))
            )
            for upper, lower in zip(above, below, strict=True)
        ],
        len(above),
    )

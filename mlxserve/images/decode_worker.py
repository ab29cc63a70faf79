"""DecodeWorker: decodes an image in a helper process."""

from __future__ import annotations

import io
import math
import warnings
from contextlib import suppress
from typing import Any

from PIL import Image, UnidentifiedImageError

from mlxserve.images.image import MAX_PIXELS
from mlxserve.images.video import NO_VIDEO, is_video

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
MAX_SOURCE_PIXELS = 64 << 20  # decoded pixels; four bytes each, and as many again to convert it
_ORIENTATION = 0x0112  # EXIF tag
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_WIDE_MODES = ("I;16", "I;16L", "I;16B", "I;16N", "I", "F")  # grey of 16 bits, read as one of these


class DecodeWorker:
    """Decodes images of `FORMATS`. Jobs raise ValueError with the end of a sentence about the image."""

    def __init__(self) -> None:
        # A limit of our own says what to do.
        Image.MAX_IMAGE_PIXELS = None

    def decode(self, data: bytes, max_pixels: int) -> tuple[int, int, bytes | None]:
        """Return (width, height, RGB of each pixel) of the first frame, upright and on white.

        The third is None, and nothing was decoded, for an image of more than `most` pixels.
        """
        with warnings.catch_warnings():  # warnings of damage that does not matter
            warnings.simplefilter("ignore")
            return self._decode(data, max_pixels)

    def _decode(self, data: bytes, max_pixels: int) -> tuple[int, int, bytes | None]:
        image = _opened(data)
        num_pixels = image.width * image.height
        if num_pixels > MAX_SOURCE_PIXELS:
            raise ValueError(
                f"has {image.width} x {image.height} pixels, and at most {MAX_SOURCE_PIXELS >> 20} "
                "million are read; make it smaller"
            )
        if num_pixels > max_pixels:
            return image.width, image.height, None
        try:
            image.load()
            whole = _upright(_smaller(_in_colour(image)), image)
        except MemoryError:
            raise
        except Exception as error:
            # The decoders raise anything.
            raise _damaged(error) from error
        return whole.width, whole.height, whole.tobytes()


def _opened(data: bytes) -> Any:
    """Open an image without decoding it. A larger JPEG than needed is opened smaller."""
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
        if image.width * image.height > MAX_PIXELS:
            image.draft(None, _fitting(image.width, image.height))
    except MemoryError:
        raise
    except UnidentifiedImageError as error:
        if is_video(data):
            raise ValueError(NO_VIDEO) from error
        raise ValueError("is not a PNG, JPEG, WebP or GIF file") from error
    except Exception as error:
        raise _damaged(error) from error
    return image


def _damaged(error: Exception) -> ValueError:
    return ValueError(f"is damaged or incomplete ({str(error)[:200] or type(error).__name__})")


def _in_colour(image: Any) -> Any:
    """Convert to RGB, with transparency in white."""
    if image.mode in _WIDE_MODES:
        return _narrowed(image).convert("RGB")
    if not image.has_transparency_data:
        return image.convert("RGB")
    image = _smaller(image.convert("RGBA"))
    white = Image.new("RGBA", image.size, "white")
    white.alpha_composite(image)
    return white.convert("RGB")


def _narrowed(image: Any) -> Any:
    """Keep the upper 8 of 16 bits: a conversion would cut off all above 255."""
    return image.convert("I").point(lambda value: value * (1 / 257)).convert("L")


def _smaller(image: Any) -> Any:
    """Shrink to at most MAX_PIXELS."""
    if image.width * image.height <= MAX_PIXELS:
        return image
    size = _fitting(image.width, image.height)
    return image.resize(size, Image.Resampling.BICUBIC, reducing_gap=2.0)


def _fitting(width: int, height: int) -> tuple[int, int]:
    """The size at which an image has at most MAX_PIXELS."""
    share = math.sqrt(MAX_PIXELS / (width * height))
    flat = max(1, int(height * share))
    narrow = min(max(1, int(width * share)), MAX_PIXELS // flat)
    return narrow, min(flat, MAX_PIXELS // narrow)


def _upright(image: Any, source: Any) -> Any:
    """Rotate as the camera says that it was held."""
    turn = None
    # What it says may be damaged as well.
    with suppress(Exception):
        turn = _TURNS.get(source.getexif().get(_ORIENTATION))
    return image if turn is None else image.transpose(turn)

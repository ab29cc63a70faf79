"""Images that Python code passes in the parts of the library's messages.

{"type": "image", "path": "cat.png"}      a file: PNG, JPEG, WebP, or the first frame of a GIF
{"type": "image", "bytes": data}          its content
{"type": "image", "image": picture}       a Pillow image, or (height, width, 3) uint8 of numpy
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from mlxserve.core.errors import InvalidParameter, InvalidRequest
from mlxserve.helpers.work import RunFairly, Work
from mlxserve.images.decode import image_decoder
from mlxserve.images.image import Image

_GIVEN = ("path", "bytes", "image")
_FILE_SECONDS = 0.01  # time to read a file


async def decoded(
    messages: Sequence[Mapping[str, Any]], run_fairly: RunFairly
) -> list[Mapping[str, Any]]:
    """Replace each image part by one with an `Image`. Raises InvalidRequest."""
    messages_with_images = []
    for number, message in enumerate(messages):
        content = message.get("content")
        if isinstance(content, (list, tuple)):
            places = (f"messages[{number}].content[{at}]" for at in range(len(content)))
            parts = [await _part(*each, run_fairly) for each in zip(content, places, strict=True)]
            message = {**message, "content": parts}
        messages_with_images.append(message)
    return messages_with_images


async def _part(part: Any, where: str, run_fairly: RunFairly) -> Any:
    if not isinstance(part, Mapping) or part.get("type") != "image":
        return part
    sources = [name for name in _GIVEN if name in part]
    if len(sources) != 1:
        raise InvalidParameter(where, f"an image needs one of {', '.join(_GIVEN)}")
    try:
        image = await _image(sources[0], part[sources[0]], run_fairly)
    except InvalidRequest as error:
        raise InvalidParameter(where, f"the image {error}") from error
    return {"type": "image", "image": image}


def _content(path: Any) -> bytes:
    return Path(path).expanduser().read_bytes()


async def _image(name: str, value: Any, run_fairly: RunFairly) -> Image:
    if name == "path":
        try:
            reading: Work[bytes] = Work(_FILE_SECONDS, partial(_content, value))
            data = await run_fairly(reading)
        except (OSError, TypeError) as error:
            raise InvalidRequest(f"cannot be read: {error}") from error
        return await image_decoder().decode(data, run_fairly)
    if name == "bytes":
        if not isinstance(value, (bytes, bytearray)):
            raise InvalidRequest(f"must be bytes, got {type(value).__name__}")
        return await image_decoder().decode(bytes(value), run_fairly)
    if isinstance(value, Image):
        return value
    import numpy as np

    try:
        pixels = value.convert("RGB") if hasattr(value, "convert") else value
        return Image.from_pixels(np.array(pixels))
    except (ValueError, TypeError, AttributeError, OSError) as error:
        raise InvalidRequest(f"is neither Pillow's nor an array of pixels: {error}") from error

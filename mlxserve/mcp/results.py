"""CallResult: a tool's result for the model, as text bounded in length and a few images."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mlxserve.system.well_formed import well_formed

MAX_RESULT = 20_000  # characters, some 5,000 tokens
_HEAD = 15_000  # start of a longer result; the rest is its end
MAX_IMAGES, MAX_IMAGE = 4, 4 << 20  # images of a result; characters of each
_IMAGE = re.compile(r"data:image/(png|jpeg|webp|gif);base64,[A-Za-z0-9+/]+=*")


@dataclass(frozen=True, slots=True)
class CallResult:
    """`is_error`: the text says what failed, in the tool or on the way to it.

    images: as data: URLs, for models that see
    """

    text: str
    is_error: bool = False
    images: tuple[str, ...] = ()


def shortened(text: str) -> str:
    """Return the start and the end of a text that is too long."""
    if len(text) <= MAX_RESULT:
        return text
    left_out = len(text) - MAX_RESULT
    tail = text[len(text) - (MAX_RESULT - _HEAD) :]
    return f"{text[:_HEAD]}\n… ({left_out:,} characters are left out here) …\n{tail}"


def result_of(content: Sequence[Any], structured: Any, *, is_error: bool) -> CallResult:
    """Return the parts of an MCP result: texts verbatim, the first images as data: URLs, others described."""
    urls = (_image_url(part) for part in content)
    images = tuple(dict.fromkeys(url for url in urls if url is not None))[:MAX_IMAGES]
    parts = [_part(part, images) for part in content]
    if not parts and structured is not None:
        parts = [json.dumps(structured, ensure_ascii=False)]
    text = shortened(well_formed("\n".join(parts))) or "(no output)"
    return CallResult(text, is_error, images)


def _image_url(part: Any) -> str | None:
    """Return an image, also of an embedded resource; None for any other part."""
    held = part.resource if part.type == "resource" else part
    data = getattr(held, "data", None) or getattr(held, "blob", None)
    url = f"data:{getattr(held, 'mime_type', None)};base64,{data}"
    is_image = len(url) <= MAX_IMAGE and _IMAGE.fullmatch(url) is not None
    return url if is_image else None


def _part(part: Any, images: Sequence[str]) -> str:
    if (url := _image_url(part)) is not None and url in images:
        return f"(image of type {url[len('data:') : url.index(';')]})"
    match part.type:
        case "text":
            return str(part.text)
        case "resource" if hasattr(part.resource, "text"):
            return str(part.resource.text)
        case "resource_link":
            return f"(a link to {part.uri})"
        case "image" | "audio":
            return f"({part.type} of type {part.mime_type}, which is not shown to the model)"
        case _:
            return f"({part.type}, which is not shown to the model)"

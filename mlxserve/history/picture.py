"""KeptImage: an image of a question, or a document's text, as stored and sent."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mlxserve.history.attachment import AttachmentRefused
from mlxserve.system.extras import extra_command

_TYPES = {
    ".png": "image/png",
    ".jpg": "image/jpeg",
    ".jpeg": "image/jpeg",
    ".webp": "image/webp",
    ".gif": "image/gif",
}
_TEXT = "data:text/plain;base64,"  # a document, whose pages have form feeds between them
MAX_SIZE = 1 << 20  # bytes of what is kept
MAX_DOCUMENT = 4 << 20  # characters of a document's URL
MAX_SIDE = 2048  # pixels of what is kept, where it was made smaller
_MAX_FILE = 64 << 20
_QUALITIES = (90, 75, 50)  # JPEG qualities, until it fits


@dataclass(frozen=True, slots=True)
class KeptImage:
    """An image or a document as a data URL.

    url: the file itself, or the text of a document, in base64
    """

    name: str
    url: str

    @property
    def is_document(self) -> bool:
        return self.url.startswith(_TEXT)

    @property
    def text(self) -> str:
        """Text of a document."""
        return self.content.decode(errors="replace")

    def part(self) -> dict[str, Any]:
        """Return it as a part of a message of OpenAI's API."""
        if self.is_document:
            return {"type": "file", "file": {"filename": self.name, "file_data": self.url}}
        return {"type": "image_url", "image_url": {"url": self.url}}

    @property
    def content(self) -> bytes:
        """Content of the file."""
        return base64.b64decode(self.url.partition(",")[2])


def is_picture(path: Path) -> bool:
    """True if the file's name is that of an image format for models."""
    return path.suffix.lower() in _TYPES


def read_picture(path: Path, typed: str | None = None) -> KeptImage:
    """Read an image, shrinking a large one. Raises AttachmentRefused, which names `typed`."""
    typed = typed or str(path)
    try:
        if not path.is_file():
            raise AttachmentRefused(f"{typed} is not a file.")
        if path.stat().st_size > _MAX_FILE:
            raise AttachmentRefused(f"{typed} is larger than {_MAX_FILE >> 20} MiB.")
        content, kind = path.read_bytes(), _TYPES[path.suffix.lower()]
    except OSError as error:
        raise AttachmentRefused(f"{typed} cannot be read: {error.strerror}.") from error
    if len(content) > MAX_SIZE:
        content, kind = _smaller(content, typed), "image/jpeg"
    return KeptImage(path.name, f"data:{kind};base64,{base64.b64encode(content).decode()}")


def _smaller(content: bytes, typed: str) -> bytes:
    """Convert to JPEG, upright, with white for what is transparent."""
    try:
        from PIL import Image, ImageOps
    except ImportError as error:
        raise AttachmentRefused(
            f"{typed} is larger than {MAX_SIZE >> 20} MiB, and making it smaller needs Pillow: "
            f"{extra_command('vision')}"
        ) from error
    try:
        image = Image.open(io.BytesIO(content), formats=("PNG", "JPEG", "WEBP", "GIF"))
        image.draft(None, (MAX_SIDE, MAX_SIDE))
        image.thumbnail((MAX_SIDE, MAX_SIDE))
        whole = ImageOps.exif_transpose(image).convert("RGBA")
    except Exception as error:
        # Decoders raise anything.
        raise AttachmentRefused(f"{typed} is damaged or no image ({error}).") from error
    white = Image.new("RGBA", whole.size, "white")
    white.alpha_composite(whole)
    for quality in _QUALITIES:
        file = io.BytesIO()
        white.convert("RGB").save(file, "JPEG", quality=quality)
        if file.tell() <= MAX_SIZE:
            break
    return file.getvalue()


def as_text(pictures: Sequence[KeptImage]) -> str:
    """Serialise pictures for the store; empty for none."""
    return json.dumps([asdict(picture) for picture in pictures]) if pictures else ""


def from_text(text: str) -> tuple[KeptImage, ...]:
    return tuple(KeptImage(**kept) for kept in json.loads(text)) if text else ()

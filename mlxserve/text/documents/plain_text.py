"""Decodes text of an unknown encoding."""

from __future__ import annotations

import codecs

# Longer marks first: that of UTF-32 begins with that of UTF-16.
_MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_SEEN = 8_192  # bytes from which the kind of a file is guessed
_MAX_CONTROLS = 0.02  # share of control characters in a text
MAX_CHARACTERS = 16 << 20  # of a document
_TEXT_CONTROLS = frozenset(b"\t\n\x0b\f\r\x1b")


def decode_text(data: bytes) -> str:
    """Decode a text file: UTF-8, UTF-16 and UTF-32, with a mark or without, else Windows-1252.

    Raises ValueError, whose message ends a sentence about the file, for binary data.
    """
    for mark, encoding in _MARKS:
        if data.startswith(mark):
            return data.decode(encoding, errors="replace")
    if (wide := _wide_encoding(data[:_SEEN])) is not None:
        return data.decode(wide, errors="replace")
    if _is_binary(data[:_SEEN]):
        raise ValueError("is not text")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return _western(data)


def checked_text(text: str) -> str:
    """Return a document's text. Raises ValueError as `decode_text` for one that is empty or huge."""
    if len(text) > MAX_CHARACTERS:
        raise ValueError(f"has more than {MAX_CHARACTERS >> 20} million characters")
    if not text.strip():
        raise ValueError("has no text")
    return text


def _western(data: bytes) -> str:
    """Windows-1252, and Latin-1 for the five bytes that it does not define."""
    try:
        return data.decode("cp1252")
    except UnicodeDecodeError:
        return data.decode("latin-1")


def _wide_encoding(start: bytes) -> str | None:
    """UTF-16 without a mark, by the zero bytes of its ASCII characters."""
    half = len(start) // 2
    if half < 2:
        return None
    even, odd = start[0 : 2 * half : 2].count(0), start[1 : 2 * half : 2].count(0)
    if odd > 0.4 * half and not even:
        return "utf-16-le"
    return "utf-16-be" if even > 0.4 * half and not odd else None


def _is_binary(start: bytes) -> bool:
    num_controls = sum(byte < 32 and byte not in _TEXT_CONTROLS for byte in start)
    return 0 in start or num_controls > _MAX_CONTROLS * len(start)

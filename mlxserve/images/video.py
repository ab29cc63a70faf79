"""Tells videos from other files: this server reads none, and says so."""

from __future__ import annotations

# The end of a sentence about a file.
NO_VIDEO = "is a video, which this server does not read; send some of its frames as images"
# Images in the same container as MP4 and QuickTime files.
_STILL_BRANDS = frozenset({b"avif", b"avis", b"heic", b"heix", b"heim", b"heis", b"mif1", b"msf1"})
_MATROSKA = b"\x1aE\xdf\xa3"  # WebM as well
_MPEG = b"\x00\x00\x01\xba"


def is_video(data: bytes) -> bool:
    """True if a file begins as an MP4, QuickTime, WebM, Matroska, AVI or MPEG file does."""
    if data[4:8] == b"ftyp":
        return data[8:12] not in _STILL_BRANDS
    is_avi = data[:4] == b"RIFF" and data[8:12] == b"AVI "
    return is_avi or data.startswith((_MATROSKA, _MPEG))

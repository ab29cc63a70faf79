"""Text that is piped into a command."""

from __future__ import annotations

import sys

from mlxserve.core.errors import InvalidRequest


def piped_text() -> str:
    """Read all of stdin. Raises InvalidRequest, which names what it is, for anything but text."""
    # Read as bytes: a text of another encoding than the terminal's would have lone surrogates.
    buffer = getattr(sys.stdin, "buffer", None)
    if buffer is None:
        return sys.stdin.read()
    from mlxserve.text.documents.plain_text import decode_text

    data: bytes = buffer.read()
    if data.startswith(b"%PDF-"):
        raise InvalidRequest("stdin is a PDF file, not text. `mlxserve run -f FILE` reads one.")
    try:
        return decode_text(data).replace("\r\n", "\n")
    except ValueError as error:
        raise InvalidRequest(
            f"stdin {error}. `mlxserve run` takes documents with -f, and images with --image."
        ) from error

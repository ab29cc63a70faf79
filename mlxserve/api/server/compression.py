"""Compression of replies: which clients take it, and streams whose every event can be read at once.

A stream's sizes tell something of its text to who watches the connection, compressed or not: without
TLS they read it, and with TLS the size of an event that is not compressed is that of its text. Only
streams that hold the client's own text are compressed, and no key is in any of them.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping

GZIP_HEADERS = {"content-encoding": "gzip"}
# A window of 4 KiB: the words before an event are those of the event before it. 20 KB per stream.
_WINDOW_BITS = 12
_MEMORY_LEVEL = 5
_LEVEL = 6  # 5 µs for an event of a few words, 16 ms for 1 MiB
_GZIP = 16  # added to the bits of the window: with gzip's header and its checksum


def accepts_gzip(headers: Mapping[str, str]) -> bool:
    """True for a client that names gzip without a weight, as all browsers and httpx do."""
    accepted = headers.get("accept-encoding", "").split(",")
    return "gzip" in (each.strip() for each in accepted)


class GzipStream:
    """Compresses one stream. After each piece the client can read all of it."""

    # The end of a flush is an empty block, on a byte's border. Another one changes nothing.
    skipped = b"\0\0\0\xff\xff"

    def __init__(self) -> None:
        self._compressor = zlib.compressobj(
            _LEVEL, zlib.DEFLATED, _GZIP + _WINDOW_BITS, _MEMORY_LEVEL
        )

    def encode(self, piece: bytes) -> bytes:
        return self._compressor.compress(piece) + self._compressor.flush(zlib.Z_SYNC_FLUSH)

    def end(self) -> bytes:
        """Return the checksum, after which there is nothing."""
        return self._compressor.flush()

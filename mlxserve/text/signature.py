"""Thinking in a form that clients keep unread and send back.

Clients that do not show thinking drop its text, but return Anthropic's `signature` and OpenAI's
`encrypted_content` as they are. So both carry the thinking itself, compressed and with a checksum. It
is no secret: a client that may send a conversation may send any thinking in it.
"""

from __future__ import annotations

import base64
import binascii
import zlib

_PREFIX = "mlxserve1."
MAX_THINKING = 4 << 20  # bytes of what is unpacked


def sign(thinking: str) -> str:
    """Encode the thinking as a signature."""
    text = thinking.encode("utf-8", "replace")
    packed = zlib.crc32(text).to_bytes(4, "big") + zlib.compress(text)
    return _PREFIX + base64.urlsafe_b64encode(packed).decode()


def signed_thinking(signature: str | None) -> str:
    """Decode a signature; empty for one that is not ours, or was damaged."""
    if signature is None or not signature.startswith(_PREFIX):
        return ""
    try:
        packed = base64.urlsafe_b64decode(signature.removeprefix(_PREFIX))
        unpacker = zlib.decompressobj()
        text = unpacker.decompress(packed[4:], MAX_THINKING)
        if not unpacker.eof or zlib.crc32(text).to_bytes(4, "big") != packed[:4]:
            return ""
        return text.decode("utf-8")
    except (ValueError, binascii.Error, zlib.error):
        return ""

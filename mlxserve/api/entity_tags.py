"""Entity tags (RFC 9110, section 8.8.3): what a client has already is not sent again."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b


def tag_of(content: bytes) -> str:
    """Return a weak tag: one for the content as it is and for its compressed form."""
    return f'W/"{blake2b(content, digest_size=8).hexdigest()}"'


def is_known(headers: Mapping[str, str], tag: str) -> bool:
    """True if a request's `If-None-Match` names the tag, weak or not."""
    named = headers.get("if-none-match", "").split(",")
    return tag.removeprefix("W/") in (each.strip().removeprefix("W/") for each in named)

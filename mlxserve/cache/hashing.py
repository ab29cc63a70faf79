"""Chained page hashes: one names a page's tokens and everything before them.

    h0 = H(root of the salt, tokens of page 0)     h1 = H(h0, tokens of page 1)     ...

Two requests that reach the same hash have the same salt and the same tokens up to that page's end,
so they may share its pages. Knows nothing of pages' ids or of who holds them.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from hashlib import blake2b

HASH_SIZE = 16  # bytes; two of 2**40 pages agree by chance about once in 10**14 such caches


def token_bytes(token_ids: Sequence[int]) -> bytes:
    """The tokens as raw little-endian int32, whatever the machine's own order."""
    tokens = token_ids if isinstance(token_ids, array) else array("i", token_ids)
    if sys.byteorder == "big":
        tokens = tokens[:]
        tokens.byteswap()
    return tokens.tobytes()


def page_hash(parent: bytes, token_ids: Sequence[int], salt: bytes = b"") -> bytes:
    """The hash of a full page. `parent` is empty for a first page, and only there `salt` counts."""
    return blake2b((parent or root(salt)) + token_bytes(token_ids), digest_size=HASH_SIZE).digest()


def extend_hashes(
    hashes: list[bytes], token_ids: Sequence[int], page_size: int, salt: bytes = b""
) -> None:
    """Append the hash of every full page of `token_ids` that has none yet."""
    parent = hashes[-1] if hashes else b""
    for start in range(len(hashes) * page_size, len(token_ids) - page_size + 1, page_size):
        parent = page_hash(parent, token_ids[start : start + page_size], salt)
        hashes.append(parent)


def root(salt: bytes) -> bytes:
    """What stands for the page before a first page."""
    # Hashed to a fixed size under a name of its own: appended raw, a salt chosen to equal a page's
    # hash would make a first page pass for that page's successor.
    return blake2b(salt, digest_size=HASH_SIZE, person=b"mlxserve salt").digest()

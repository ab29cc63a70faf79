"""Chained page hashes: each identifies a page's tokens and all tokens before them.

    h0 = H(root of the salt, tokens of page 0)     h1 = H(h0, tokens of page 1)     ...

Two requests with the same hash have the same salt and the same tokens up to the end of that page,
so they may share pages. Knows neither page ids nor holders.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from hashlib import blake2b

HASH_SIZE = 16  # bytes; of 10**14 caches of 2**40 pages, about one has a collision


def token_bytes(token_ids: Sequence[int]) -> bytes:
    """Return the tokens as little-endian int32 on every machine."""
    tokens = token_ids if isinstance(token_ids, array) else array("i", token_ids)
    if sys.byteorder == "big":
        tokens = tokens[:]
        tokens.byteswap()
    return tokens.tobytes()


def ids_of(tokens: bytes) -> array[int]:
    """Return the ids that `token_bytes` made bytes of."""
    ids = array("i", tokens)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids


def page_hash(
    parent: bytes, token_ids: Sequence[int], salt: bytes = b"", keys: bytes = b""
) -> bytes:
    """Return the hash of a page.

    parent: hash of the page before it; empty for a first page, which uses `salt` instead
    keys: what ids alone do not identify, such as the content of images
    """
    hashed = (parent or root(salt)) + token_bytes(token_ids) + keys
    return blake2b(hashed, digest_size=HASH_SIZE).digest()


def extend_hashes(
    hashes: list[bytes],
    token_ids: Sequence[int],
    page_size: int,
    salt: bytes = b"",
    marks: Sequence[tuple[int, int, bytes]] = (),
) -> None:
    """Append the hashes of those full pages of `token_ids` that have none yet.

    marks: (first position, position after the last, key) of images, whose token ids are negative
    """
    parent = hashes[-1] if hashes else b""
    for start in range(len(hashes) * page_size, len(token_ids) - page_size + 1, page_size):
        end = start + page_size
        page, keys = token_ids[start:end], b""
        if marks and min(page) < 0:
            keys = b"".join(key for first, last, key in marks if first < end and last > start)
        parent = page_hash(parent, page, salt, keys)
        hashes.append(parent)


def root(salt: bytes) -> bytes:
    """Return the parent hash of a first page."""
    # Hashed to a fixed size with its own personalisation: with a raw salt that equals a page's hash,
    # a first page would have the hash of that page's successor.
    return blake2b(salt, digest_size=HASH_SIZE, person=b"mlxserve salt").digest()

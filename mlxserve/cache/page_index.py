"""PageIndex: which page has which content, by its hash and by the page before it.

Knows ids, hashes and tokens; neither holders nor the order of eviction. Token ids are compared as
well, so even a hash collision never gives a prompt the pages of another one.

A tail is a page that was published before it was full. It is never matched, because a request that
continues from it would write to it. It is copied instead.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import cast

from mlxserve.cache.hashing import ids_of, page_hash, token_bytes
from mlxserve.cache.radix import Children

_MAX_COMPARED = 8  # pages that a new one is compared with to find where they differ


class PageIndex:
    """An index of hashed pages among ids 0 .. `num_pages`-1, of `page_size` tokens each."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self._page_size = page_size
        self._hashes: list[bytes | None] = [None] * num_pages
        # The hash of the page before each hashed page, and the tokens in it.
        self._parents: list[bytes] = [b""] * num_pages
        self._tokens: list[bytes] = [b""] * num_pages
        self._page_of: dict[bytes, int] = {}
        self._children = Children(num_pages)  # hashed pages by their parents' hashes
        self._tails = Children(num_pages)  # those that are not full

    def __len__(self) -> int:
        """Return the number of pages findable by hash, whether free or in use."""
        return len(self._page_of)

    def hash_of(self, page: int) -> bytes | None:
        return self._hashes[page]

    def is_known(self, hash_: bytes) -> bool:
        return hash_ in self._page_of

    def page_of(self, hash_: bytes) -> int:
        """Return the page with this hash. Raises KeyError."""
        return self._page_of[hash_]

    def find(self, hash_: bytes) -> int | None:
        """Return the page with this hash, or None."""
        return self._page_of.get(hash_)

    def is_full(self, page: int) -> bool:
        """Return True for a findable page that is not a tail."""
        return len(self._tokens[page]) == 4 * self._page_size

    # ---- lookups

    def match(self, hashes: Sequence[bytes], token_ids: Sequence[int], skip: int = 0) -> list[int]:
        """Return the pages of the longest cached prefix of `hashes`, without the first `skip` pages.

        Valid until the next `allocate` or `reset` of the pool: retain the pages before that.
        """
        if skip >= len(hashes) or hashes[skip] not in self._page_of:
            return []  # the usual case: waiting requests are matched again and again
        found = list(map(self._page_of.get, islice(hashes, skip, None)))
        num_found = found.index(None) if None in found else len(found)
        pages = cast(list[int], found[:num_found])
        start = skip * self._page_size
        wanted = token_bytes(token_ids[start : start + num_found * self._page_size])
        held = [self._tokens[page] for page in pages]
        if b"".join(held) == wanted:  # one comparison: one per page took five times as long
            return pages
        size = 4 * self._page_size
        starts = range(0, len(wanted), size)
        are_same = [tokens == wanted[i : i + size] for tokens, i in zip(held, starts, strict=True)]
        return pages[: are_same.index(False)]

    def find_tail(self, parent: bytes, token_ids: Sequence[int]) -> tuple[int, int] | None:
        """(page, number of common tokens) of the best tail after `parent`; None if there is none.

        Its tokens begin with these ids, or the other way round. Valid as long as a match.
        """
        if not self._tails.has(parent):
            return None
        wanted = token_bytes(token_ids)
        found = [
            (min(len(held), len(wanted)) // 4, page)
            for page in self._tails.children_of(parent)
            if (held := self._tokens[page]).startswith(wanted) or wanted.startswith(held)
        ]
        num_tokens, page = max(found, default=(0, 0))
        return (page, num_tokens) if num_tokens else None

    def num_unchanged(self, pages: Sequence[int], hashes: Sequence[bytes]) -> int:
        """Number of leading pages that still have these hashes."""
        now = list(map(self._hashes.__getitem__, pages))
        if now == hashes[: len(now)]:
            return len(now)
        return next(
            i for i, (one, other) in enumerate(zip(now, hashes, strict=False)) if one != other
        )

    def num_common(self, parent: bytes, token_ids: Sequence[int]) -> int:
        """Return how many leading tokens the most similar recent page after `parent` has in common."""
        wanted = token_bytes(token_ids)
        newest = islice(self._children.children_of(parent), _MAX_COMPARED)
        return max((_num_common(self._tokens[page], wanted) for page in newest), default=0)

    def with_following(self, hashes: Iterable[bytes]) -> list[bytes]:
        """Return these hashes and those of all pages after them, parents before children."""
        seen: dict[bytes, None] = {}
        following = list(hashes)
        while following:
            hash_ = following.pop()
            if hash_ not in seen:
                seen[hash_] = None
                following += filter(None, map(self.hash_of, self._children.children_of(hash_)))
        return list(seen)

    def is_shared(self, hash_: bytes) -> bool:
        """Return True if more than one known page follows the page with this hash."""
        return self._children.has_several(hash_)

    def parent_of(self, page: int) -> bytes:
        """Return the hash of the page before a filed page."""
        return self._parents[page]

    def token_ids_of(self, page: int) -> array[int]:
        """Return the tokens of a filed page."""
        return ids_of(self._tokens[page])

    # ---- changes

    def add(self, page: int, hash_: bytes, parent: bytes, token_ids: Sequence[int]) -> bool:
        """File a page, as a tail if it is not full. False if another page has the same content."""
        assert self._hashes[page] is None, f"page {page} is published twice"
        if hash_ in self._page_of:
            return False
        self._page_of[hash_] = page
        self._children.add(parent, page)
        if len(token_ids) < self._page_size:
            self._tails.add(parent, page)
        self._hashes[page] = hash_
        self._parents[page] = parent
        self._tokens[page] = token_bytes(token_ids)
        return True

    def remove(self, page: int) -> bytes:
        """Remove a filed page, and return its hash."""
        hash_ = self._hashes[page]
        assert hash_ is not None, f"page {page} has no hash"
        del self._page_of[hash_]
        self._children.remove(self._parents[page], page)
        if len(self._tokens[page]) < 4 * self._page_size:
            self._tails.remove(self._parents[page], page)
        self._hashes[page] = None
        self._parents[page] = self._tokens[page] = b""
        return hash_

    def move(self, page: int, target: int) -> None:
        """Move the entry of a filed page to `target`, which has none."""
        hash_, parent, tokens = self._hashes[page], self._parents[page], self._tokens[page]
        self.remove(page)
        assert hash_ is not None, f"page {page} has no hash"
        self._page_of[hash_] = target
        self._children.add(parent, target)
        if len(tokens) < 4 * self._page_size:
            self._tails.add(parent, target)
        self._hashes[target], self._parents[target], self._tokens[target] = hash_, parent, tokens

    def grow(self, num_pages: int) -> None:
        """Extend the ids to 0 .. `num_pages`-1."""
        num_new = num_pages - len(self._hashes)
        self._hashes += [None] * num_new
        for contents in (self._parents, self._tokens):
            contents += [b""] * num_new
        for children in (self._children, self._tails):
            children.grow(num_pages)

    def check(self) -> None:
        """Audit the invariants. Raises AssertionError."""
        hashed = {page: h for page, h in enumerate(self._hashes) if h is not None}
        assert self._page_of == {h: page for page, h in hashed.items()}, "hashes and index disagree"
        for page, h in hashed.items():
            tokens = struct.unpack(f"<{len(self._tokens[page]) // 4}i", self._tokens[page])
            parent = self._parents[page]
            is_known = parent and min(tokens) >= 0  # what images add to a hash is not kept here
            assert not is_known or page_hash(parent, tokens) == h, f"page {page} has a wrong hash"
        self._children.check()
        self._tails.check()
        assert set(self._children.filed()) == {(self._parents[page], page) for page in hashed}, (
            "a page is filed under another parent"
        )
        tails = [page for page in hashed if len(self._tokens[page]) < 4 * self._page_size]
        assert set(self._tails.filed()) == {(self._parents[page], page) for page in tails}, (
            "a tail is filed under another parent"
        )


def _num_common(held: bytes, wanted: bytes) -> int:
    """Return how many leading tokens, of four bytes each, two pages have in common."""
    size = min(len(held), len(wanted))
    starts = range(0, size, 4)
    return next((i // 4 for i in starts if held[i : i + 4] != wanted[i : i + 4]), size // 4)

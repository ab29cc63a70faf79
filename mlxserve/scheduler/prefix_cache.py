"""PrefixCache: what a request finds in the pool by its pages' hashes, and what it leaves there.

Knows requests and hashes; the pool knows pages. Decides nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from mlxserve.cache.hashing import extend_hashes, page_hash, root
from mlxserve.cache.pages import PagePool
from mlxserve.request import CacheMiss, CacheReport, Chunk, LiveRequest
from mlxserve.scheduler.explain import Explainer
from mlxserve.scheduler.prefix_followers import PrefixFollowers


class Tail(NamedTuple):
    """A page whose first tokens are the next of a prompt, which goes on differently behind them."""

    page: int
    num_tokens: int


class _Match:
    """What was found for a request that waits, as long as none of it is evicted."""

    __slots__ = ("_known", "num_evicted", "pages")

    def __init__(self, num_evicted: int) -> None:
        self.num_evicted = num_evicted  # of the pool, when these pages were all there
        self.pages: list[int] = []
        self._known: set[int] = set()

    def add(self, pages: Sequence[int]) -> None:
        self.pages += pages
        self._known.update(pages)

    def has_lost(self, evicted: Sequence[int]) -> bool:
        return not self._known.isdisjoint(evicted)

    def keep(self, count: int) -> None:
        """Only the first pages are still what they were."""
        if count < len(self.pages):
            self.pages = self.pages[:count]
            self._known = set(self.pages)


class PrefixCache:
    """Finds nothing and publishes nothing where it is off. Tails it finds only to be copied."""

    def __init__(
        self, pool: PagePool, followers: PrefixFollowers, *, is_on: bool, copies_tails: bool
    ) -> None:
        self.is_on = is_on
        self._copies_tails = is_on and copies_tails
        self._pool = pool
        self._followers = followers
        self._explainer = Explainer(pool)
        self._matches: dict[LiveRequest, _Match] = {}

    def hash(self, request: LiveRequest) -> None:
        """Make the request know the hashes of its full pages."""
        extend_hashes(
            request.page_hashes, request.token_ids, self._pool.page_size, request.asked.cache_salt
        )

    def matchable(self, request: LiveRequest, first: int = 0) -> list[bytes]:
        """Hashes of its pages from `first` on, but never of the last token: that one must be
        computed."""
        return request.page_hashes[first : (len(request.token_ids) - 1) // self._pool.page_size]

    def match(self, request: LiveRequest) -> list[int]:
        """Cached pages of its known tokens.

        Remembered: as long as none of them is evicted, a match can only grow.
        """
        if not self.is_on:
            return []
        self.hash(request)
        found = self._matches.get(request)
        if found is None:
            found = self._matches[request] = _Match(self._pool.num_evicted)
        evicted = self._pool.evicted_since(found.num_evicted)
        if evicted is None or found.has_lost(evicted):
            found.keep(self._pool.num_unchanged(found.pages, request.page_hashes))
        found.num_evicted = self._pool.num_evicted
        skip = len(found.pages)
        if skip < len(request.page_hashes) and self._pool.is_known(request.page_hashes[skip]):
            found.add(self._pool.match(self.matchable(request), request.token_ids, skip=skip))
        return found.pages

    def tail(self, request: LiveRequest, cached: Sequence[int]) -> Tail | None:
        """What could be copied behind the pages that it matches. Holds as long as they do.

        The last page of a prompt that is cached whole, or the end of a named prefix. Nothing where
        pages of it are on disk: they begin where a page begins.
        """
        if not self._copies_tails or request.saved is not None:
            return None
        page_size, hashes, token_ids = self._pool.page_size, request.page_hashes, request.token_ids
        start, last = len(cached) * page_size, len(token_ids) - 1
        if start + page_size == len(token_ids) and (
            whole := self._pool.match(hashes, token_ids, skip=len(cached))
        ):
            return Tail(whole[0], page_size - 1)
        parent = self._parent(request, len(cached))
        found = self._pool.find_tail(parent, token_ids[start : min(last, start + page_size)])
        return Tail(*found) if found else None

    def forget(self, request: LiveRequest) -> None:
        """It waits no more: nobody asks for its match again."""
        self._matches.pop(request, None)

    def forget_all(self) -> None:
        """Pages have moved: what was found is to be looked for again."""
        self._matches.clear()

    def publish(self, chunk: Chunk) -> list[int]:
        """Make the pages findable that this chunk completed, now that it has been computed.

        As `publish_pages`.
        """
        request, page_size = chunk.request, self._pool.page_size
        # A token that was dropped with its request's end stays unknown.
        end = min(chunk.end, len(request.token_ids)) // page_size
        return self.publish_pages(request, chunk.start // page_size, end)

    def publish_pages(self, request: LiveRequest, first: int, end: int) -> list[int]:
        """Make pages first .. end of its table findable: they hold what their tokens say.

        The indices of those that are found elsewhere already, and so were not published.
        """
        if first >= end or not self.is_on:
            return []
        self.hash(request)
        page_size, parent = self._pool.page_size, self._parent(request, first)
        duplicates = []
        for index in range(first, end):
            hash_, page = request.page_hashes[index], request.page_table[index]
            tokens = request.token_ids[index * page_size : (index + 1) * page_size]
            if not self._pool.publish(page, hash_, parent, tokens):
                duplicates.append(index)
            self._followers.page_published(hash_)
            parent = hash_
        return duplicates

    def chain(self, request: LiveRequest) -> tuple[bytes, ...]:
        """Hashes of the pages that a named prefix keeps: the full ones, and the tail if it will
        be copied."""
        self.hash(request)
        full, tail = divmod(request.num_prompt, self._pool.page_size)
        pages = tuple(request.page_hashes[:full])
        return (*pages, page_hash(*self._tail(request))) if tail and self._copies_tails else pages

    def publish_tail(self, request: LiveRequest) -> None:
        """Make the page that its prompt ends in findable, if it will be copied."""
        chain, full = self.chain(request), request.num_prompt // self._pool.page_size
        if len(chain) > full:
            parent, tokens = self._tail(request)
            self._pool.publish_tail(request.page_table[full], chain[full], parent, tokens)

    def _tail(self, request: LiveRequest) -> tuple[bytes, Sequence[int]]:
        """Of the page that its prompt ends in: what stands before it, and what it holds."""
        full = request.num_prompt // self._pool.page_size
        tokens = request.token_ids[full * self._pool.page_size : request.num_prompt]
        return self._parent(request, full), tokens

    def _parent(self, request: LiveRequest, index: int) -> bytes:
        """What stands before page `index` in its chain."""
        return request.page_hashes[index - 1] if index else root(request.asked.cache_salt)

    def report_fork(self, num_pages: int) -> CacheReport:
        """As `report`, of a prompt that shares all its full pages with the one it is a fork of."""
        if not self.is_on:
            return CacheReport(0, 0, 0, CacheMiss.OFF)
        num_tokens = num_pages * self._pool.page_size
        return CacheReport(num_pages, num_tokens, num_tokens, CacheMiss.BELOW_ONE_PAGE)

    def report(self, request: LiveRequest, num_pages: int, num_copied: int) -> CacheReport:
        """What it did for a prompt of which it found so many pages, and tokens of the next one."""
        if not self.is_on:
            return CacheReport(0, 0, 0, CacheMiss.OFF)
        found = self._explainer.report(request, self.matchable(request), num_pages)
        num_tokens = found.num_tokens + num_copied
        differs_at = max(found.differs_at, num_tokens)
        return replace(found, num_tokens=num_tokens, differs_at=differs_at)

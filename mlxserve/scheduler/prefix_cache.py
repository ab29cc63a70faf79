"""PrefixCache: what a request finds in the pool by its pages' hashes, and what it leaves there.

Knows requests and hashes; the pool knows pages. Decides nothing.
"""

from __future__ import annotations

from mlxserve.cache.hashing import extend_hashes, root
from mlxserve.cache.pages import PagePool
from mlxserve.request import CacheMiss, CacheReport, Chunk, Request
from mlxserve.scheduler.explain import Explainer
from mlxserve.scheduler.siblings import Siblings


class PrefixCache:
    """Finds nothing and publishes nothing where it is off."""

    def __init__(self, pool: PagePool, siblings: Siblings, *, is_on: bool) -> None:
        self.is_on = is_on
        self._pool = pool
        self._siblings = siblings
        self._explainer = Explainer(pool)
        self._matches: dict[Request, tuple[int, list[int]]] = {}

    def hash(self, request: Request) -> None:
        """Make the request know the hashes of its full pages."""
        extend_hashes(
            request.page_hashes, request.token_ids, self._pool.page_size, request.cache_salt
        )

    def matchable(self, request: Request) -> list[bytes]:
        """Hashes of its pages, but never of the last token: that one must be computed."""
        return request.page_hashes[: (len(request.token_ids) - 1) // self._pool.page_size]

    def match(self, request: Request) -> list[int]:
        """Cached pages of its known tokens.

        Remembered: without an eviction in between a match can only have grown.
        """
        if not self.is_on:
            return []
        self.hash(request)
        num_evicted, pages = self._matches.get(request, (self._pool.num_evicted, []))
        if num_evicted != self._pool.num_evicted:
            pages = []
        pages += self._pool.match(self.matchable(request), request.token_ids, skip=len(pages))
        self._matches[request] = (self._pool.num_evicted, pages)
        return pages

    def forget(self, request: Request) -> None:
        """It waits no more: nobody asks for its match again."""
        self._matches.pop(request, None)

    def publish(self, chunk: Chunk) -> None:
        """Make the pages findable that this chunk completed, now that it has been computed."""
        request, page_size = chunk.request, self._pool.page_size
        # A token that was dropped with its request's end stays unknown.
        end = min(chunk.end, len(request.token_ids)) // page_size
        self.publish_pages(request, chunk.start // page_size, end)

    def publish_pages(self, request: Request, first: int, end: int) -> None:
        """Make pages first .. end of its table findable: they hold what their tokens say."""
        if first >= end or not self.is_on:
            return
        self.hash(request)
        for index in range(first, end):
            self._publish_page(request, index)
            self._siblings.pass_by(request.page_hashes[index])

    def _publish_page(self, request: Request, index: int) -> None:
        page_size, hashes = self._pool.page_size, request.page_hashes
        parent = hashes[index - 1] if index else root(request.cache_salt)
        tokens = request.token_ids[index * page_size : (index + 1) * page_size]
        self._pool.publish(request.page_table[index], hashes[index], parent, tokens)

    def report_fork(self, num_pages: int) -> CacheReport:
        """As `report`, of a prompt that shares all its full pages with the one it is a fork of."""
        if not self.is_on:
            return CacheReport(0, 0, 0, CacheMiss.OFF)
        num_tokens = num_pages * self._pool.page_size
        return CacheReport(num_pages, num_tokens, num_tokens, CacheMiss.BELOW_ONE_PAGE)

    def report(self, request: Request, num_pages: int) -> CacheReport:
        """What it did for a prompt of which it found so many pages."""
        if not self.is_on:
            return CacheReport(0, 0, 0, CacheMiss.OFF)
        return self._explainer.report(request, self.matchable(request), num_pages)

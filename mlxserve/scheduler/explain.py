"""Explainer: why no more of a prompt was found in the cache.

Discloses nothing of other clients' prompts: pages are compared within one salt only, and another
salt is given as the reason only where the same client used it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from mlxserve.cache.hashing import page_hash, root
from mlxserve.cache.pages import PagePool
from mlxserve.request import ANONYMOUS, CacheMiss, CacheReport, LiveRequest

MAX_REMEMBERED = 4096  # first pages whose salt is known


class Explainer:
    """Remembers the salt of each client's last prompt, by its first page."""

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._salts: OrderedDict[tuple[str, bytes], bytes] = OrderedDict()

    def report(
        self, request: LiveRequest, matchable: Sequence[bytes], num_pages: int
    ) -> CacheReport:
        """The report of a prompt of which the first `num_pages` of `matchable` pages were found."""
        known_salt = self._remember(request)
        num_tokens = num_pages * self._pool.page_size
        if num_pages == len(matchable):
            return CacheReport(num_pages, num_tokens, num_tokens, CacheMiss.BELOW_ONE_PAGE)
        if self._pool.was_evicted(matchable[num_pages]):
            return CacheReport(num_pages, num_tokens, num_tokens, CacheMiss.EVICTED)
        if num_pages == 0 and known_salt not in (None, request.asked.cache_salt):
            return CacheReport(0, 0, 0, CacheMiss.OTHER_SALT)
        parent = matchable[num_pages - 1] if num_pages else root(request.asked.cache_salt)
        page = request.token_ids[num_tokens : num_tokens + self._pool.page_size]
        differs_at = num_tokens + self._pool.num_common(parent, page)
        return CacheReport(num_pages, num_tokens, differs_at, CacheMiss.NEW_TEXT)

    def _remember(self, request: LiveRequest) -> bytes | None:
        """The salt of this client's last prompt with the same first page."""
        if len(request.token_ids) < self._pool.page_size:
            return None
        client = "" if request.asked.client.startswith(ANONYMOUS) else request.asked.client
        key = client, page_hash(b"", request.token_ids[: self._pool.page_size])
        known = self._salts.pop(key, None)
        self._salts[key] = request.asked.cache_salt
        if len(self._salts) > MAX_REMEMBERED:
            self._salts.popitem(last=False)
        return known

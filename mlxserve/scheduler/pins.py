"""Pins: prefixes whose pages stay until they are dropped by name.

    reserve ── the prefix is computed by a request of its own ──┬─ pin ─ ... ─ drop
                                                                └─ drop (it was aborted)

What is reserved counts against the quota from the start, so that prefixes computed side by side
cannot pin more together than they may.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from mlxserve.cache.pages import PagePool
from mlxserve.errors import PrefixQuotaExceeded
from mlxserve.request import Request


class Pins:
    """At most `quota` pages of the pool, by the id of the request that computed them."""

    def __init__(self, pool: PagePool, quota: int) -> None:
        self._pool = pool
        self._quota = quota
        self._promised: dict[str, int] = {}
        self._pinned: dict[str, list[int]] = {}

    @property
    def num_pages(self) -> int:
        """Pages that are pinned, or will be."""
        return self._pool.num_pinned + sum(self._promised.values())

    def num_needed(self, request: Request) -> int:
        """Pages of its prompt that nobody has pinned yet."""
        num_full = request.num_prompt // self._pool.page_size
        return num_full - self.num_shared(request.page_hashes[:num_full])

    def num_shared(self, hashes: Sequence[bytes]) -> int:
        """How many pages of this chain, from its beginning, are pinned."""
        return sum(1 for _ in takewhile(self._pool.is_pinned, hashes))

    def promised(self, request: Request) -> int:
        return self._promised.get(request.id, 0)

    def reserve(self, request: Request) -> None:
        """Raises PrefixQuotaExceeded, and nothing happened, where the quota is too small."""
        num_needed = self.num_needed(request)
        if self.num_pages + num_needed > self._quota:
            raise PrefixQuotaExceeded(
                f"the prefix needs {num_needed} more pages of {self._pool.page_size} tokens, but "
                f"{self.num_pages} of the {self._quota} that named prefixes may have are taken. "
                "Remove a prefix, shorten this one, or raise max_pinned_fraction, "
                "gpu_memory_utilization or num_pages."
            )
        self._promised[request.id] = num_needed

    def pin(self, request: Request) -> None:
        """Its prompt has been computed and published: keep the pages that are full."""
        num_full = request.num_prompt // self._pool.page_size
        pages = self._pool.match(request.page_hashes[:num_full], request.token_ids)
        assert len(pages) == num_full, f"{request.id}: a page of the prefix is lost"
        del self._promised[request.id]
        self._pool.pin(pages)
        self._pinned[request.id] = pages

    def drop(self, request_id: str) -> None:
        """Its pages may be evicted again; no-op if there are none."""
        self._promised.pop(request_id, None)
        if pages := self._pinned.pop(request_id, None):
            self._pool.unpin(pages)

    def cancel(self, request: Request) -> None:
        """It will not be pinned, if it has not been."""
        self._promised.pop(request.id, None)

    def check(self, live: Sequence[Request]) -> None:
        """Audit. Raises AssertionError."""
        assert self.num_pages <= self._quota, "more is pinned than may be"
        computing = {request.id for request in live if request.pins}
        assert self._promised.keys() == computing, "a prefix is promised, but not computed"
        pinned = {page for pages in self._pinned.values() for page in pages}
        assert len(pinned) == self._pool.num_pinned, "a page is pinned by nobody"

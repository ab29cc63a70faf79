"""Pins: prefixes whose pages stay until they are dropped by name.

    reserve ── the prefix is computed by a request of its own ──┬─ pin ─ ... ─ drop
                                                                └─ cancel (it was aborted)

From its reservation on a prefix claims its pages, by their hashes, until it is dropped or cancelled:
so prefixes computed side by side cannot pin more together than they may, and one that leans on
another's pages keeps its claim on them when the other is dropped.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence

from mlxserve.cache.pages import PagePool
from mlxserve.errors import PrefixQuotaExceeded
from mlxserve.request import LiveRequest


class Pins:
    """At most a part of the pool, by the id of the request that computes or computed its pages."""

    def __init__(self, pool: PagePool, max_fraction: float) -> None:
        self._pool = pool
        self._max_fraction = max_fraction
        self._claims: Counter[bytes] = Counter()  # hash of a page -> prefixes that have it
        self._promised: dict[str, tuple[bytes, ...]] = {}  # hashes of the prefix's pages
        self._pinned: dict[str, tuple[bytes, ...]] = {}

    @property
    def num_pages(self) -> int:
        """Pages that are pinned, or will be."""
        return len(self._claims)

    def quota_of(self, num_pages: int) -> int:
        """How many pages of a pool of so many may be pinned."""
        return int(self._max_fraction * num_pages)

    def num_kept_from(self, request: LiveRequest) -> int:
        """Pages that are pinned, or will be, and are not this request's prompt's own.

        Judged by what was promised, and not by its page table, where duplicates of pinned pages
        may be until they are published. So only a new reservation makes this number grow,
        whatever is pinned, dropped, cancelled, admitted or preempted.
        """
        if chain := self._promised.get(request.id):
            return self.num_pages - len(chain)
        # Its last token is computed again, and so is that token's page.
        num_matchable = (request.num_prompt - 1) // self._pool.page_size
        return self.num_pages - self._num_claimed(request.page_hashes[:num_matchable])

    def reserve(self, request: LiveRequest, chain: tuple[bytes, ...]) -> None:
        """Raises PrefixQuotaExceeded, and nothing happened, where the quota is too small.

        `chain`: hashes of the pages to be kept.
        """
        num_new = sum(hash_ not in self._claims for hash_ in chain)
        quota = self.quota_of(self._pool.num_pages)
        if self.num_pages + num_new > quota:
            raise PrefixQuotaExceeded(
                f"the prefix needs {num_new} more pages of {self._pool.page_size} tokens, but "
                f"{self.num_pages} of the {quota} that named prefixes may have are taken. "
                "Remove a prefix, shorten this one, or raise max_pinned_fraction, "
                "gpu_memory_utilization or num_pages."
            )
        self._promised[request.id] = chain
        self._claims.update(chain)

    def pin(self, request: LiveRequest) -> None:
        """Its prompt has been computed and published: keep its pages."""
        chain = self._promised.pop(request.id)
        assert all(map(self._pool.is_known, chain)), f"{request.id}: a page of the prefix is lost"
        self._pool.pin([self._pool.page_of(hash_) for hash_ in chain])
        self._pinned[request.id] = chain

    def drop(self, request_id: str) -> None:
        """Its pages may be evicted again; no-op if none are pinned."""
        if chain := self._pinned.pop(request_id, None):
            self._pool.unpin([self._pool.page_of(hash_) for hash_ in chain])
            self._give_up(chain)

    def cancel(self, request: LiveRequest) -> None:
        """It will not be pinned, if it has not been."""
        self._give_up(self._promised.pop(request.id, ()))

    def check(self, live: Sequence[LiveRequest]) -> None:
        """Audit. Raises AssertionError."""
        quota = self.quota_of(self._pool.num_pages)
        assert self.num_pages <= quota, "more is pinned than may be"
        computing = {request.id for request in live if request.asked.pins}
        assert self._promised.keys() == computing, "a prefix is promised, but not computed"
        pinned = {hash_ for chain in self._pinned.values() for hash_ in chain}
        assert len(pinned) == self._pool.num_pinned, "a page is pinned by nobody"
        assert all(map(self._pool.is_pinned, pinned)), "a page of a prefix is not pinned"
        claims = Counter(h for c in (*self._promised.values(), *self._pinned.values()) for h in c)
        assert claims == self._claims, "a claim is miscounted"

    def _num_claimed(self, chain: Sequence[bytes]) -> int:
        """How many pages of it are claimed: a beginning, as every prefix claims its first."""
        return bisect_left(chain, True, key=lambda hash_: hash_ not in self._claims)

    def _give_up(self, chain: Sequence[bytes]) -> None:
        self._claims.subtract(chain)
        for hash_ in chain:
            if not self._claims[hash_]:
                del self._claims[hash_]

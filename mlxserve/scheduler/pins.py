"""Pins: named prefixes, whose pages stay until the prefix is dropped.

    reserve ── the prefix is computed by a request of its own ──┬─ fulfil ─ ... ─ drop
                                                                └─ cancel (it was aborted)

From its reservation until it is dropped or cancelled, a prefix claims its pages by their hashes.
So prefixes that are computed at the same time cannot exceed the quota together, and a prefix that
shares another's pages keeps its claim on them when the other one is dropped.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Sequence

from mlxserve.cache.pages import PagePool
from mlxserve.core.errors import PrefixQuotaExceeded
from mlxserve.request import LiveRequest, Request


class Pins:
    """Claims of named prefixes, by the id of the request that computes their pages.

    Returns which pages to pin; the page tables pin them.
    """

    def __init__(self, pool: PagePool, max_fraction: float) -> None:
        self._pool = pool
        self._max_fraction = max_fraction
        self._claims: Counter[bytes] = Counter()  # hash of a page -> prefixes that have it
        self._promised: dict[str, tuple[bytes, ...]] = {}  # hashes of the prefix's pages
        self._pinned: dict[str, tuple[bytes, ...]] = {}
        self._requests: dict[str, Request] = {}  # of the prefixes that are promised or pinned
        self._own: dict[str, Counter[bytes]] = {}  # claims by client

    @property
    def num_pages(self) -> int:
        """Number of pages that are or will be pinned."""
        return len(self._claims)

    def quota_of(self, num_pages: int) -> int:
        """Return the number of pages that may be pinned in a pool of `num_pages`."""
        return int(self._max_fraction * num_pages)

    def has(self, hash_: bytes) -> bool:
        """Return True if a prefix claims the page with this hash."""
        return hash_ in self._claims

    def num_kept_from(self, request: LiveRequest) -> int:
        """Return how many pages are or will be pinned that are not in this request's prompt.

        Counts claims rather than the page table, which may hold duplicates of pinned pages until they
        are published. So only a new reservation raises this number.
        """
        if chain := self._chain(request):
            return self.num_pages - len(chain)
        # Its last token is computed again, and so is that token's page.
        num_matchable = (request.num_prompt - 1) // self._pool.page_size
        # The pages it shares are the first ones, as every prefix claims its first pages.
        shared = bisect_left(
            request.page_hashes,
            True,
            hi=min(num_matchable, len(request.page_hashes)),
            key=lambda hash_: hash_ not in self._claims,
        )
        return self.num_pages - shared

    def num_beside(self, request: LiveRequest) -> int:
        """Return how many pages are or will be pinned for other requests, shared ones included.

        The request cannot have these if it has to compute its whole prompt.
        """
        return self.num_pages - sum(self._claims[hash_] == 1 for hash_ in self._chain(request))

    def _chain(self, prefix: LiveRequest) -> tuple[bytes, ...]:
        """Return the claims of a named prefix, computed or not; empty for other requests."""
        if not prefix.asked.pins:
            return ()
        return self._promised.get(prefix.id) or self._pinned.get(prefix.id, ())

    def refuse_resize(self, num_pages: int) -> None:
        """Refuse a size whose quota is below the claims, or whose share is below a client's claims.

        Raises PrefixQuotaExceeded.
        """
        quota = self.quota_of(num_pages)
        if self.num_pages > quota:
            raise PrefixQuotaExceeded(
                f"named prefixes have {self.num_pages} pages, but of {num_pages} they may have only "
                f"{quota}. Remove a prefix, keep more pages, or raise max_pinned_fraction."
            )
        if (excess := self._beyond_share(quota)) is not None:
            num_own, share = excess
            raise PrefixQuotaExceeded(
                f"one API key has named prefixes of {num_own} pages, but of {num_pages} pages it may have "
                f"only {share}, its share of the {quota} for named prefixes. Remove a prefix of that key, or "
                "keep more pages."
            )

    def reserve(self, request: LiveRequest, chain: tuple[bytes, ...]) -> None:
        """Claim the pages with these hashes. Raises PrefixQuotaExceeded without any change."""
        num_new = sum(hash_ not in self._claims for hash_ in chain)
        quota = self.quota_of(self._pool.num_pages)
        if self.num_pages + num_new > quota:
            raise PrefixQuotaExceeded(
                f"the prefix needs {num_new} more pages of {self._pool.page_size} tokens, but "
                f"{self.num_pages} of the {quota} that named prefixes may have are taken. "
                "Remove a prefix, shorten this one, or raise max_pinned_fraction, "
                "gpu_memory_utilization or num_pages."
            )
        self._check_share(request, chain, quota)
        self.claim(request, chain)

    def claim(self, request: LiveRequest, chain: tuple[bytes, ...]) -> None:
        """Claim the pages without the checks of `reserve`, to move a granted claim to a new pool."""
        self._requests[request.id] = request.asked
        self._promised[request.id] = chain
        self._claims.update(chain)
        self._own.setdefault(request.asked.client, Counter()).update(chain)

    def fulfil(self, request: LiveRequest) -> list[int]:
        """Return the pages to pin, once the prompt has been computed and published."""
        chain = self._promised.pop(request.id)
        assert all(map(self._pool.index.is_known, chain)), (
            f"{request.id}: a page of the prefix is lost"
        )
        self._pinned[request.id] = chain
        return [self._pool.index.page_of(hash_) for hash_ in chain]

    def drop(self, request_id: str) -> list[int]:
        """End the claim of a pinned prefix, and return the pages to unpin; none if it is not pinned."""
        if request_id not in self._pinned:
            return []
        chain = self._pinned.pop(request_id)
        self._end_claim(request_id, chain)
        return [self._pool.index.page_of(hash_) for hash_ in chain]

    def cancel(self, request: LiveRequest) -> None:
        """End the claim of a prefix that is not pinned yet; no-op for other requests."""
        if request.id in self._promised:
            self._end_claim(request.id, self._promised.pop(request.id))

    def check(self, live: Sequence[LiveRequest], prefixes: Collection[str]) -> None:
        """Audit the invariants. Raises AssertionError.

        prefixes: ids of named prefixes that are kept or recomputed
        """
        quota = self.quota_of(self._pool.num_pages)
        assert self.num_pages <= quota, "more pages are pinned than the quota allows"
        computing = {request.id for request in live if request.asked.pins}
        assert self._promised.keys() == computing, "a prefix is promised, but not computed"
        # Prefixes that share a page pin it once each.
        claimed = (hash_ for chain in self._pinned.values() for hash_ in chain)
        wanted = Counter(map(self._pool.index.find, claimed))
        pinned = Counter(self._pool.pinned())
        assert pinned <= wanted, "a page is pinned for no prefix"
        assert pinned >= wanted, "a page of a prefix is not pinned"
        claims = Counter(h for c in (*self._promised.values(), *self._pinned.values()) for h in c)
        assert claims == self._claims, "a claim is miscounted"
        own = {
            client: Counter[bytes]() for client in {each.client for each in self._requests.values()}
        }
        for name, chain in (*self._promised.items(), *self._pinned.items()):
            own[self._requests[name].client].update(chain)
        own = {client: claims for client, claims in own.items() if claims}
        mine = {client: claims for client, claims in self._own.items() if claims}
        assert own == mine, "a claim of a client is miscounted"
        known = self._promised.keys() | self._pinned.keys()
        assert self._requests.keys() == known, "a prefix has no client, or a client no prefix"
        assert known.issuperset(prefixes), "a named prefix is kept, but claims nothing"

    def _check_share(self, request: LiveRequest, chain: tuple[bytes, ...], quota: int) -> None:
        """Refuse a client more than its share of the quota, counting a shared page once."""
        share = request.asked.pin_share
        if share >= 1:
            return
        own = self._pages_of(request.asked.client)
        num_new, max_own = sum(hash_ not in own for hash_ in set(chain)), int(share * quota)
        if len(own) + num_new > max_own:
            raise PrefixQuotaExceeded(
                f"the prefix needs {num_new} more pages of {self._pool.page_size} tokens, but one "
                f"API key may have {max_own} of the {quota} pages for named prefixes and has "
                f"{len(own)}. Remove a prefix, shorten this one, or raise max_prefix_share_per_key."
            )

    def _beyond_share(self, quota: int) -> tuple[int, int] | None:
        """Return (pages, maximum) of a client that claims more than its share; None if there is none.

        A client's share is the largest with which one of its prefixes was added: the only key has the
        whole quota until another key is created.
        """
        shares: dict[str, float] = {}
        for request in self._requests.values():
            shares[request.client] = max(request.pin_share, shares.get(request.client, 0.0))
        for client, share in shares.items():
            num_own, max_own = len(self._pages_of(client)), int(share * quota)
            if num_own > max_own:
                return num_own, max_own
        return None

    def _pages_of(self, client: str) -> Collection[bytes]:
        """Return the hashes of the pages that the client claims."""
        return self._own.get(client, Counter()).keys()

    def _end_claim(self, request_id: str, chain: Sequence[bytes]) -> None:
        client = self._requests.pop(request_id).client
        # None is left if the last prefix with a whole page was dropped: a shorter one claims nothing.
        own = self._own.get(client, Counter())
        for claims in (self._claims, own):
            claims.subtract(chain)
            for hash_ in chain:
                if not claims[hash_]:
                    del claims[hash_]
        if not own:
            self._own.pop(client, None)

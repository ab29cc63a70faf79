"""Capacity: how long a request can get beside named prefixes, and what is refused for want of pages.

reserved      what a request was promised when it was queued; no prefix and no resize takes it
capacity  what it could have now, if it were alone with the pages of named prefixes
"""

from __future__ import annotations

from collections.abc import Iterable

from mlxserve.cache.pages import PagePool
from mlxserve.core.errors import PagesPromised, PrefixQuotaExceeded, PromptTooLong
from mlxserve.request import LiveRequest, Request, check_num_pages
from mlxserve.scheduler.pins import Pins
from mlxserve.scheduler.prefix_cache import PrefixCache


class Capacity:
    """Of the requests over one pool. Changes nothing but hashes."""

    def __init__(
        self,
        max_model_len: int,
        pool: PagePool,
        pins: Pins,
        cache: PrefixCache,
        *,
        may_recompute: bool = False,
    ) -> None:
        """`may_recompute`: a request may have to compute its pages again, for its recurrent state or its
        windows."""
        self._max_model_len = max_model_len
        self._pool = pool
        self._pins = pins
        self._cache = cache
        self._may_recompute = may_recompute

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus answer without pins: at most what the whole pool holds."""
        return min(self._max_model_len, self._pool.num_pages * self._pool.page_size)

    def of(self, request: LiveRequest, num_pages: int | None = None) -> int:
        """Tokens that the request could have if it were alone with the pins, made and promised.

        Only a new promise of pins and a smaller pool make it shrink, and they are refused where
        they would take what `reserved` returns. `num_pages`: as if the pool had this number of pages.
        """
        num_pages = num_pages or self._pool.num_pages
        if request.asked.skips_cache or self._may_recompute:
            # No state or window need be kept at a pinned page, so it may have to compute all again.
            num_pages -= self._pins.num_beside(request)
        elif self._pins.num_pages:
            self._hash_beginning(request)
            num_pages -= self._pins.num_kept_from(request)
        return min(self._max_model_len, num_pages * self._pool.page_size)

    def can_have(self, request: LiveRequest, length: int, num_pages: int | None = None) -> bool:
        """Whether its capacity is at least `length` tokens.

        Mostly without hashing: a first named prefix, or a resize, asks this of a whole queue.
        """
        least = (num_pages or self._pool.num_pages) - self._pins.num_pages  # if it shares no pin
        if length <= min(self._max_model_len, least * self._pool.page_size):
            return True
        return length <= self.of(request, num_pages)

    def _hash_beginning(self, request: LiveRequest) -> None:
        """Hash as many of its pages as it may share with named prefixes, and few more."""
        hashes, num_full = request.page_hashes, len(request.token_ids) // self._pool.page_size
        if not hashes and num_full:
            self._cache.hash(request, 1)
        while hashes and len(hashes) < num_full and self._pins.has(hashes[-1]):
            self._cache.hash(request, 2 * len(hashes))

    @staticmethod
    def reserved(request: LiveRequest) -> int:
        """Tokens that the request must always have room for: what it was promised, and if it has
        outgrown that, one more than it has."""
        return max(request.promised_length, len(request.token_ids) + 1)

    def length_limit(self, asked: Request) -> int:
        """Tokens of prompt and answer with which it ends, where the pool has room for them."""
        if asked.params.max_tokens is None:
            return self._max_model_len
        return min(self._max_model_len, asked.num_prompt + asked.params.max_tokens)

    def max_length(self, request: LiveRequest) -> int:
        """Known tokens with which the request ends: by its limit, or because it has no room."""
        length = request.length_limit
        return length if self.can_have(request, length) else min(length, self.of(request))

    def is_cut(self, live: Iterable[LiveRequest]) -> bool:
        """Whether one of these requests cannot have what it is owed."""
        return not all(self.can_have(request, self.reserved(request)) for request in live)

    # ---- refusals

    def refuse_too_long(self, request: LiveRequest) -> None:
        """Raises PromptTooLong where not even one token of an answer has room after the prompt."""
        num_tokens, capacity = len(request.token_ids), self.of(request)
        if num_tokens < capacity:
            return
        if capacity == self._max_model_len:
            raise PromptTooLong.for_answer(num_tokens, capacity)
        limit = f"the cache's {self._pool.num_pages} pages hold"
        advice = "raise gpu_memory_utilization or num_pages"
        if num_pinned := self._pins.num_pages:
            limit = f"beside {num_pinned} pinned pages the cache holds"
            advice = "remove a named prefix"
        raise PromptTooLong.for_answer(num_tokens, capacity, limit=limit, advice=advice)

    def refuse_cut(self, live: Iterable[LiveRequest]) -> None:
        """Raises PagesPromised where the pins would cut the answer of one of these requests."""
        if self.is_cut(live):
            raise PagesPromised(
                "the pages of this prefix are promised to a request that is running or waiting, "
                "whose answer it would cut. Try again when that has ended, shorten the prefix, "
                "raise num_pages, or set max_tokens on requests: without it they are promised "
                "the whole context."
            )

    def refuse_resize(
        self, num_pages: int, live: Iterable[LiveRequest], pinned: Iterable[LiveRequest]
    ) -> None:
        """Raises InvalidParameter, and where it is smaller: PrefixQuotaExceeded where named prefixes, or those
        of one client, have too many pages for it, or one could not be computed again; PagesPromised where
        it would cut the answer of a live request."""
        check_num_pages(num_pages)
        if num_pages >= self._pool.num_pages:
            return
        self._pins.refuse_resize(num_pages)
        for prefix in pinned:
            if len(prefix.token_ids) >= (room := self.of(prefix, num_pages)):
                raise PrefixQuotaExceeded(
                    f"{num_pages} pages would leave {room} tokens for a named prefix of "
                    f"{len(prefix.token_ids)}, which is computed again with one more. Remove a prefix, or "
                    "keep more pages."
                )
        for request in live:
            reserved = self.reserved(request)
            if not self.can_have(request, reserved, num_pages):
                raise PagesPromised(
                    f"{num_pages} pages would leave {self.of(request, num_pages)} tokens for a "
                    f"request that has {len(request.token_ids)} and was promised {reserved}: its answer "
                    "would be cut. Keep more pages, abort it, or try again when it has ended."
                )

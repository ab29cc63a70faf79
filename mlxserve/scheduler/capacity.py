"""Capacity: how long a request can get beside named prefixes, and what is refused for lack of pages.

reserved  tokens that a request was promised when it was queued; no prefix and no resize takes them
capacity  tokens that it could have now, if it were alone with the pages of named prefixes
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mlxserve.cache.kinds.kind import EndKind
from mlxserve.cache.pages import PagePool
from mlxserve.core.config import SchedulerConfig
from mlxserve.core.errors import (
    InvalidParameter,
    PagesPromised,
    PrefixQuotaExceeded,
    PromptTooLong,
)
from mlxserve.request import LiveRequest, Request, check_num_pages
from mlxserve.scheduler.limit import longest_block
from mlxserve.scheduler.pins import Pins
from mlxserve.scheduler.prefix_cache import PrefixCache


class Capacity:
    """The capacity of requests over one pool. Changes nothing but hashes."""

    def __init__(
        self,
        max_model_len: int,
        pool: PagePool,
        pins: Pins,
        cache: PrefixCache,
        *,
        may_recompute: bool = False,
    ) -> None:
        """Take the limits of one pool.

        may_recompute: requests may have to compute cached pages again, for their recurrent states or windows
        """
        self._max_model_len = max_model_len
        self._pool = pool
        self._pins = pins
        self._cache = cache
        self._may_recompute = may_recompute

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus answer without pins, at most the tokens of the whole pool."""
        return min(self._max_model_len, self._pool.num_pages * self._pool.page_size)

    def of(self, request: LiveRequest, num_pages: int | None = None) -> int:
        """Return the tokens that a request could have if it were alone with all pins, promised or made.

        Only new pins and a smaller pool lower it, and they are refused if it would fall below `reserved`.

        num_pages: size of the pool to assume instead of its own
        """
        num_pages = num_pages or self._pool.num_pages
        if request.asked.skips_cache or self._may_recompute:
            # A pinned page may have no state or window, so the request may have to compute all pages.
            num_pages -= self._pins.num_beside(request)
        elif self._pins.num_pages:
            self._hash_beginning(request)
            num_pages -= self._pins.num_kept_from(request)
        return min(self._max_model_len, num_pages * self._pool.page_size)

    def can_have(self, request: LiveRequest, length: int, num_pages: int | None = None) -> bool:
        """Return True if the request's capacity is at least `length` tokens.

        Mostly without hashing: a first named prefix, or a resize, checks a whole queue.
        """
        min_pages = (
            num_pages or self._pool.num_pages
        ) - self._pins.num_pages  # if it shares no pin
        if length <= min(self._max_model_len, min_pages * self._pool.page_size):
            return True
        return length <= self.of(request, num_pages)

    def _hash_beginning(self, request: LiveRequest) -> None:
        """Hash the pages that the request may share with named prefixes, and at most twice as many."""
        hashes, num_full = request.page_hashes, len(request.token_ids) // self._pool.page_size
        if not hashes and num_full:
            self._cache.hash(request, 1)
        while hashes and len(hashes) < num_full and self._pins.has(hashes[-1]):
            self._cache.hash(request, 2 * len(hashes))

    @staticmethod
    def reserved(request: LiveRequest) -> int:
        """Return the tokens that the request must have room for.

        They are those it was promised, or one more than it has if it has outgrown the promise.
        """
        return max(request.promised_length, len(request.token_ids) + 1)

    def length_limit(self, asked: Request) -> int:
        """Return the maximum length of prompt and answer, whatever the pool has room for."""
        if asked.params.max_tokens is None:
            return self._max_model_len
        return min(self._max_model_len, asked.num_prompt + asked.params.max_tokens)

    def max_length(self, request: LiveRequest) -> int:
        """Return the number of known tokens at which the request ends, by its limit or the pool's."""
        length = request.length_limit
        return length if self.can_have(request, length) else min(length, self.of(request))

    def is_cut(self, live: Iterable[LiveRequest]) -> bool:
        """Return True if one of these requests lacks room for its `reserved` tokens."""
        return not all(self.can_have(request, self.reserved(request)) for request in live)

    # ---- refusals

    def refuse_too_long(self, request: LiveRequest) -> None:
        """Raises PromptTooLong if there is no room for a token after the prompt."""
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
        """Raises PagesPromised if the pins would cut the answer of one of these requests."""
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
        """Refuse a size that does not hold what was promised.

        Raises InvalidParameter. For a smaller pool also PrefixQuotaExceeded, if named prefixes or those of one
        client have too many pages, or one could not be computed again; and PagesPromised, if the answer of a
        live request would be cut.
        """
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


def refuse_large_images(asked: Request, config: SchedulerConfig, ends: Sequence[EndKind]) -> None:
    """Raises InvalidParameter for an image that may not be divided and that a step may have no room for."""
    longest = max(end - first for first, end in asked.blocks)
    rows = f"an image has {longest} rows, which attend to one another and are computed in one step"
    most = longest_block(config)
    if longest > most:
        raise InvalidParameter(
            "messages",
            f"{rows}; a step has room for {most} beside other answers. Raise max_num_batched_tokens or "
            "lower max_num_seqs",
        )
    most = min((end.room.max_block() for end in ends), default=longest)
    if longest > most:
        raise InvalidParameter(
            "messages",
            f"{rows}; pages are reserved for {most}. Make the image smaller, or its sides more alike",
        )

"""Capacity: how long a request can get, and with how many tokens it ends.

Where pages are pinned, a request cannot have all of the pool: only what it would find if it were
alone with the pins.
"""

from __future__ import annotations

from collections.abc import Iterable

from mlxserve.cache.pages import PagePool
from mlxserve.request import LiveRequest
from mlxserve.scheduler.pins import Pins
from mlxserve.scheduler.prefix_cache import PrefixCache


class Capacity:
    """Measured when a request arrives or starts, and again whenever pins or the pool change."""

    def __init__(self, max_model_len: int, pool: PagePool, cache: PrefixCache, pins: Pins) -> None:
        self._max_model_len = max_model_len
        self._pool = pool
        self._cache = cache
        self._pins = pins

    @property
    def most(self) -> int:
        """Without pins. A context that the whole pool cannot hold ends where the pool ends."""
        return min(self._max_model_len, self._pool.num_pages * self._pool.page_size)

    def of(self, request: LiveRequest, num_pages: int | None = None) -> int:
        """Tokens it could have if it were alone with what is pinned, or will be.

        For a live request this never shrinks, but by a new promise of pins or a smaller pool, and
        those are refused where they would take what the request has and its next two tokens.
        `num_pages`: as if the pool had so many.
        """
        num_pages = num_pages or self._pool.num_pages
        if self._pins.num_pages:
            num_pages -= self._pins.num_kept_from(request)
        return min(self._max_model_len, num_pages * self._pool.page_size)

    def measure(self, request: LiveRequest) -> None:
        """Write down in the request where it ends. It is asked again before it decodes."""
        if self._pins.num_pages:
            self._cache.hash(request)
        request.steady_until = 0
        request.capacity = request.full_at = self.of(request)
        if request.asked.params.max_tokens is not None:
            request.full_at = min(
                request.capacity, request.num_prompt + request.asked.params.max_tokens
            )

    def measure_all(self, requests: Iterable[LiveRequest]) -> None:
        for request in requests:
            self.measure(request)

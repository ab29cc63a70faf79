"""WindowRoom: how many requests the window pages serve at the same time, and how far each may run."""

from __future__ import annotations

from collections.abc import Iterable

from mlxserve.cache.groups import Window
from mlxserve.cache.kinds.kind import Room
from mlxserve.cache.pages import PagePool
from mlxserve.request import LiveRequest, PageTable

# Pages beyond its window that a running prompt takes from ends of other conversations: smaller chunks take longer
# per token.
CHUNK_PAGES = 16


def held(request: LiveRequest) -> PageTable:
    """Return the pages of its window that the request holds."""
    return request.window_table[request.window_first :]


class WindowRoom(Room):
    """The room in one pool of window pages; changes nothing."""

    def __init__(self, pool: PagePool, window: Window) -> None:
        self._pool = pool
        self._window = window
        self._num_held = window.num_held

    def num_free(self) -> int:
        return self._pool.num_free

    def num_own(self, request: LiveRequest) -> int:
        return sum(map(self._pool.is_exclusive, held(request)))

    def can_grow(self, request: LiveRequest, num_pages: int) -> bool:
        return num_pages - len(request.window_table) <= self._pool.num_free

    def max_pages(self, request: LiveRequest) -> int:
        """Return the pages that the table may cover, so that a chunk takes no kept and few ends' pages."""
        num_pages = len(request.window_table)
        num_held = num_pages - request.window_first
        num_kept = self._pool.order.num_kept
        return num_pages + self._num_growable(num_held, self._pool.num_free, num_kept)

    def max_block(self) -> int:
        return self._window.longest_block

    # ---- waiting requests

    def num_reserved(self, running: Iterable[LiveRequest]) -> int:
        page_size, num_held, reserved = self._pool.page_size, self._num_held, 0
        for request in running:
            missing = min(-(-request.prefill_end // page_size), num_held)
            missing -= len(request.window_table) - request.window_first
            if missing > 0:
                reserved += missing
        return reserved

    def num_lacking(self, request: LiveRequest, num_cached: int, num_reserved: int) -> int:
        return self._num_needed(request, num_cached) - (self._pool.num_free - num_reserved)

    def num_growable_from(self, request: LiveRequest, num_cached: int, num_reserved: int) -> int:
        num_free = self._pool.num_free - num_reserved
        found = self._found(request, num_cached)
        num_kept = self._pool.order.num_kept - sum(map(self._pool.order.is_kept_free, found))
        num_free -= self._pool.num_idle(found)
        return self._num_growable(len(found), num_free, num_kept)

    def can_read(self, num_reserved: int) -> bool:
        return self._pool.num_free - num_reserved >= self._num_held

    def _num_needed(self, request: LiveRequest, num_cached: int) -> int:
        """Return the free pages that a waiting request takes before it releases any, cached ones included."""
        num_missing = -(-len(request.token_ids) // self._pool.page_size) - num_cached
        found = self._found(request, num_cached)
        return min(num_missing, self._num_held - len(found)) + self._pool.num_idle(found)

    def _num_growable(self, num_held: int, num_free: int, num_kept: int) -> int:
        needed = self._num_held - num_held
        unkept = max(self._num_held - num_held, num_free - num_kept)
        return min(num_free, unkept, max(needed + CHUNK_PAGES, self._pool.num_spare))

    def _found(self, request: LiveRequest, num_cached: int) -> list[int]:
        """Return the window that the request would find if it began after `num_cached` pages."""
        first = self._window.first_before(num_cached)
        return list(map(self._pool.index.page_of, request.page_hashes[first:num_cached]))

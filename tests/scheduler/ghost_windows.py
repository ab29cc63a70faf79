"""GhostWindows: what the slots of layers with a window hold, judged as the cache of the other layers is.

A row may attend only over slots that hold exactly its own prefix at the positions of its window. So no page
is given back a row early, found without its window, published too early, or written while others see it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from mlxserve.cache.kinds.kind import find
from mlxserve.cache.kinds.window_pages import WindowPages
from mlxserve.request import Chunk, LiveRequest
from mlxserve.scheduler.scheduler import Scheduler


@dataclass
class GhostWindows:
    scheduler: Scheduler
    slots: dict[int, tuple[bytes, int]] = field(default_factory=dict)  # slot -> (salt, prefix)

    @property
    def _windows(self) -> WindowPages | None:
        return find(self.scheduler.page_tables.ends, WindowPages)

    @property
    def are_kept(self) -> bool:
        return self._windows is not None

    def run(
        self,
        chunks: Sequence[tuple[Chunk, Sequence[int]]],
        unread: Iterable[Chunk],
    ) -> None:
        """Write all rows of a step, then judge them. Each chunk with the names of its request's prefixes
        by their last position."""
        windows = self._windows
        if windows is None:
            assert all(chunk.window_table is None for chunk, _ in chunks)
            return
        pool = windows.pool
        seen = {page for chunk in unread for page in self._pages(windows, chunk)}
        for chunk, prefixes in chunks:
            assert len(chunk.window_table) == len(chunk.page_table), "tables of two lengths"
            for position in range(chunk.start, chunk.end):
                page = chunk.window_table[position // pool.page_size]
                assert pool.ref_count(page) == 1, f"page {page} of a window is shared and written"
                assert pool.index.hash_of(page) is None, (
                    f"page {page} of a window is found and written"
                )
                slot = self._slot(windows, chunk, position)
                self.slots[slot] = chunk.request.asked.cache_salt, prefixes[position]
                is_own = any(one.request is chunk.request for one in unread)
                assert is_own or page not in seen, "a page of a window in flight is written"
        for chunk, prefixes in chunks:
            first = max(0, chunk.start - windows.window.size + 1)
            for position in range(first, chunk.end):
                held = self.slots.get(self._slot(windows, chunk, position))
                assert held == (chunk.request.asked.cache_salt, prefixes[position]), (
                    f"{chunk.request.id} sees {held} at {position}, from {chunk.start} on"
                )

    @staticmethod
    def _pages(windows: WindowPages, chunk: Chunk) -> Sequence[int]:
        first_seen = max(0, chunk.start - windows.window.size + 1)
        return chunk.window_table[first_seen // windows.pool.page_size :]

    @staticmethod
    def _slot(windows: WindowPages, chunk: Chunk, position: int) -> int:
        page_size = windows.pool.page_size
        return chunk.window_table[position // page_size] * page_size + position % page_size

    def judge(self, requests: Iterable[LiveRequest], unread: Iterable[Chunk]) -> None:
        """What can be found holds its request's tokens, and was read; no more is held than is needed."""
        windows = self._windows
        if windows is None:
            return
        pool, window = windows.pool, windows.window
        for chunk in unread:
            for position in range(chunk.start, chunk.end):
                page = chunk.window_table[position // pool.page_size]
                assert pool.index.hash_of(page) is None, (
                    f"page {page} is found, but not yet computed"
                )
        for request in requests:
            is_read = request.num_computed < request.disk_end * pool.page_size or request.loading
            is_still = request.num_in_flight == 0 and not request.is_drafting and not is_read
            if is_still and request.page_table:
                num_pages = request.num_computed // pool.page_size
                assert request.window_first == window.first_before(num_pages), (
                    f"{request.id} holds pages that it does not see"
                )

"""WindowEnds: the windows that conversations can continue from, and which of them is dropped first."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from mlxserve.cache.ends import End
from mlxserve.cache.groups import Window
from mlxserve.cache.kinds.end_reclaimer import EndReclaimer
from mlxserve.cache.kinds.reclaim import PageReclaimer
from mlxserve.cache.kinds.window_room import CHUNK_PAGES, held
from mlxserve.cache.pages import PagePool
from mlxserve.request import LiveRequest, PageTable, as_page_table


class WindowEnds(EndReclaimer, PageReclaimer):
    """The window pages of one pool. A window is dropped as a whole, and its pages are evicted next."""

    name = "windows"

    def __init__(self, pool: PagePool, window: Window) -> None:
        super().__init__()
        self.pool = pool
        self._window = window
        self.min_units = window.num_held
        self.initial_units = min(pool.num_pages, 2 * window.num_held)

    # ---- new ends

    def add(self, hashes: Sequence[bytes], num_pages: int) -> None:
        """Add the end after the first `num_pages` pages, if their whole window is cached."""
        last = hashes[self._window.first_before(num_pages) : num_pages]
        if last and num_pages <= len(hashes) and all(map(self.pool.index.is_known, last)):
            self._version += 1
            before = self._ends.last_before(hashes[:num_pages])
            num_tokens = num_pages * self.pool.page_size
            self._ends.add(last, num_tokens, self.pool.order.clock, before)
            self.pool.order.unmark_useless(map(self.pool.index.page_of, last))

    def has_page(self, page: int) -> bool:
        """Return True if the page is in the window of an end."""
        hash_ = self.pool.index.hash_of(page)
        return hash_ is not None and self._ends.has_unit(hash_)

    # ---- dropped ends

    def make_room(self, count: int) -> None:
        while count > self.pool.num_spare:
            cheapest = self._cheapest()
            if cheapest is None:
                # Only kept pages are left, which are evicted one by one.
                self._drop_before(count - self.pool.num_spare)
                return
            self.drop_end(cheapest[1])

    def _num_freed(self, _: bytes, end: End, is_leaf: bool) -> float:
        num_own = self._num_own(end)
        return num_own and num_own * self.weight + is_leaf * self._num_leading(end)

    def _num_own(self, end: End) -> int:
        return sum(map(self._is_free, self._ends.alone(end)))

    def _is_free(self, hash_: bytes) -> bool:
        return self.pool.order.is_evictable(self.pool.index.find(hash_))

    def _reclaim(self, hashes: list[bytes]) -> None:
        find = self.pool.index.find
        pages = [page for page in map(find, hashes) if page is not None]
        self.pool.order.mark_useless(pages)

    def next_dropped(self) -> list[tuple[bytes, int]]:
        """Return (hash, page) of the ends whose pages the next window, and a chunk of its prompt, would take."""
        missing = self._window.num_held + CHUNK_PAGES - self.pool.num_spare
        if missing <= 0:
            return []
        pages: dict[bytes, int] = {}
        for _, end in self._first(missing):  # each frees at least one page
            if len(pages) >= missing:
                break
            for hash_ in reversed(self._ends.hashes_of(end)):
                pages[hash_] = self.pool.index.page_of(hash_)
        return list(pages.items())

    def _drop_before(self, num_evicted: int) -> None:
        """Drop the ends that have one of the next `num_evicted` pages."""
        order, hash_of = self.pool.order, self.pool.index.hash_of
        doomed = set(map(hash_of, order.first(num_evicted + len(order.useless))))
        self._drop_where(doomed.__contains__)

    def drop_broken(self) -> None:
        """Drop the ends that have a page which is no longer cached."""
        self._drop_where(lambda hash_: not self.pool.index.is_known(hash_))

    def _drop_where(self, matches: Callable[[bytes], bool]) -> None:
        for end in self._ends.with_any(matches):
            self.drop_end(end)

    def check(self, holders: Sequence[LiveRequest]) -> None:
        """Audit the invariants. Raises AssertionError."""
        assert self._continued.keys() <= set(holders), "an ended request goes on from an end"
        self._ends.check()
        broken = self._ends.with_any(lambda hash_: not self.pool.index.is_known(hash_))
        assert not broken, "an end has lost a page of its window"

    # ---- shared memory

    def table(self, request: LiveRequest) -> PageTable:
        return held(request)

    def named(self, request: LiveRequest) -> PageTable:
        return request.window_table

    def rename(self, request: LiveRequest, targets: Mapping[int, int]) -> None:
        # Entries before the window are not read, but must be pages of the pool.
        passed = [0] * request.window_first
        renamed = [targets.get(page, page) for page in held(request)]
        request.window_table = as_page_table(passed + renamed)

    def num_to_allocate(self, request: LiveRequest) -> int:
        left = -(-request.prefill_end // self.pool.page_size) - len(request.window_table)
        most = self._window.num_held + CHUNK_PAGES - len(held(request))
        return max(0, min(left, most))

    def num_at_begin(self, request: LiveRequest, cached: Sequence[int]) -> int:
        missing = -(-len(request.token_ids) // self.pool.page_size) - len(cached)
        hashes = request.page_hashes[self._window.first_before(len(cached)) : len(cached)]
        found = list(map(self.pool.index.page_of, hashes))
        most = self._window.num_held + CHUNK_PAGES - len(found)
        return min(missing, most) + self.pool.num_idle(found)

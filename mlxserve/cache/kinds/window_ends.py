"""WindowEnds: the windows that conversations can continue from, and which of them is dropped first."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from math import inf

from mlxserve.cache.ends import End, Ends
from mlxserve.cache.groups import Window
from mlxserve.cache.kinds.reclaim import Reclaimer
from mlxserve.cache.kinds.window_room import CHUNK_PAGES, held
from mlxserve.cache.pages import PagePool
from mlxserve.request import LiveRequest, PageTable, as_page_table

_MAX_DROPPED = 256  # dropped ends that are remembered for the next `pop_dropped_ends`


class WindowEnds(Reclaimer):
    """The window pages of one pool. A window is dropped as a whole, and its pages are evicted next."""

    name = "windows"

    def __init__(self, pool: PagePool, window: Window) -> None:
        self.pool = pool
        self._dropped: deque[bytes] = deque(maxlen=_MAX_DROPPED)  # ends that were dropped
        self._version = 0  # counts changes of the ends
        self._memo: tuple[tuple[int, int, int], tuple[float, bytes] | None] | None = None
        self._window = window
        self._ends = Ends()
        self._continued: dict[LiveRequest, bytes] = {}  # the end that a request continued from
        self.min_pages = window.num_held
        self.initial_pages = min(pool.num_pages, 2 * window.num_held)

    def has_end(self, hash_: bytes) -> bool:
        return hash_ in self._ends

    def pop_dropped_ends(self) -> list[bytes]:
        dropped = list(self._dropped)
        self._dropped.clear()
        return dropped

    # ---- new ends

    def begin(self, request: LiveRequest, hash_: bytes) -> None:
        """Record that a request continues after the page with this hash."""
        self._ends.use(hash_, self.pool.order.clock)
        self._continued[request] = hash_

    def add(self, hashes: Sequence[bytes], num_pages: int) -> None:
        """Add the end after the first `num_pages` pages, if their whole window is cached."""
        last = hashes[self._window.first_before(num_pages) : num_pages]
        if last and num_pages <= len(hashes) and all(map(self.pool.index.is_known, last)):
            self._version += 1
            self._ends.add(last, num_pages * self.pool.page_size, self.pool.order.clock)
            self.pool.order.unmark_useless(map(self.pool.index.page_of, last))

    def finish(self, request: LiveRequest, num_pages: int) -> None:
        """End a request that has computed `num_pages` pages, and mark the end it continued as passed."""
        continued = self._continued.pop(request, None)
        if continued is not None and num_pages and request.page_hashes[num_pages - 1] in self._ends:
            self._ends.pass_by(continued)

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

    def next_cost(self) -> float:
        if self.pool.order.useless:
            return 0.0
        cheapest = self._cheapest()
        return inf if cheapest is None else cheapest[0]

    def _cheapest(self) -> tuple[float, bytes] | None:
        key = self._version, self.pool.order.clock, self.pool.num_free
        if self._memo is None or self._memo[0] != key:
            cheapest = self._ends.cheapest(self.pool.order.clock, self._num_freed, self._least)
            self._memo = key, cheapest
        return self._memo[1]

    def _num_freed(self, _: bytes, end: End, is_leaf: bool) -> float:
        """Return what dropping an end frees, in full pages; 0 if it frees no window page."""
        num_freed = sum(map(self._is_free, self._ends.alone(end)))
        return num_freed and num_freed * self.weight + is_leaf * self._num_leading(end)

    def cheapest_leaf(self, is_free: Callable[[bytes], bool]) -> tuple[float, bytes] | None:
        def num_freed(hash_: bytes, end: End, is_leaf: bool) -> float:
            if not is_leaf or not is_free(hash_):
                return 0
            num_own = sum(map(self._is_free, self._ends.alone(end)))
            return num_own * self.weight + self._num_leading(end)

        return self._ends.cheapest(self.pool.order.clock, num_freed, self._least)

    @property
    def _least(self) -> float:
        """Minimum tokens that an end saves for each full page's bytes.

        An end frees at most one page of the window and one full page for each page by which it is
        later than the end before it.
        """
        return (
            0.999 * self.pool.page_size / (1 + self.weight)
        )  # a little less, as costs are rounded

    def _num_leading(self, end: End) -> float:
        """Return how many full pages lead to this end, but to no earlier one."""
        return self._ends.num_saved(end) / self.pool.page_size

    def _is_free(self, hash_: bytes) -> bool:
        page = self.pool.index.find(hash_)
        return page in self.pool.order.normal or page in self.pool.order.hot

    def drop_end(self, end: bytes) -> None:
        """Drop an end: its pages are evicted next, but for those that another end has."""
        find = self.pool.index.find
        pages = [page for page in map(find, self._ends.drop(end)) if page is not None]
        self.pool.order.mark_useless(pages)
        self._dropped.append(end)
        self._version += 1

    def next_dropped(self) -> list[tuple[bytes, int]]:
        """Return (hash, page) of the ends whose pages the next window, and a chunk of its prompt, would take."""
        missing = self._window.num_held + CHUNK_PAGES - self.pool.num_spare
        if missing <= 0:
            return []
        pages: dict[bytes, int] = {}
        for end in self._ends.by_cost(self.pool.order.clock, self._num_freed):
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

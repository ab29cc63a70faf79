"""WindowPages: pages of the layers that see the last positions only, in a pool of their own.

A request holds a page of this pool for each of its pages from `window_first` on. Full ones are found by the
same hashes as those of the other layers, and a cached prefix is usable only up to a page whose whole window
is cached.

    passed     pages that no later row of their request sees: released while it runs, evicted before all others
    expected   passed as well, but another prompt will probably continue there: where the prompt ended, or
               a follower waits
    ends       the window where the prompt or the answer of a request ended, or such a place was passed:
               dropped as a whole, the cheapest first (`Ends`)
    kept       the last window of a named prefix, or of a conversation that is about to continue: evicted
               after all others, but before a request has to wait

Owns its pool, as the page tables own theirs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from math import inf

from mlxserve.cache.groups import Window
from mlxserve.cache.kinds.kind import EndKind, Has, Start, Units, Uses
from mlxserve.cache.kinds.turn_ends import likely_ends
from mlxserve.cache.kinds.window_ends import WindowEnds
from mlxserve.cache.kinds.window_room import WindowRoom, held
from mlxserve.cache.pages import PagePool
from mlxserve.request import CacheMiss, LiveRequest, as_page_table


class WindowPages(EndKind):
    """The window pages of one pool, which has at least `Window.num_held` pages."""

    name = "windows"
    missing = CacheMiss.WINDOW_EVICTED
    has_table = True
    holds_found = True
    pool: PagePool

    def __init__(self, pool: PagePool, window: Window) -> None:
        assert pool.num_pages >= window.num_held, "not even one request would go on"
        assert pool.page_size == window.page_size
        self.pool = pool
        self.window = window
        self.room = WindowRoom(pool, window)
        self.reclaimer = self.ends = WindowEnds(pool, window)
        # (first page, page after the last) of the windows before the pages after which others will continue.
        self._expected: dict[LiveRequest, list[tuple[int, int]]] = {}
        self._kept: dict[str, frozenset[bytes]] = {}  # the last windows of named prefixes
        # The number of named prefixes that have a page in their last window.
        self._num_keepers: Counter[bytes] = Counter()

    def renewed(self, pool: PagePool) -> WindowPages:  # noqa: ARG002 (of full pages)
        return WindowPages(self.pool.renewed(), self.window)

    def has(self, hash_: bytes) -> bool:
        return self.pool.index.is_known(hash_)

    def unit_of(self, hash_: bytes) -> int:
        return self.pool.index.page_of(hash_)

    # ---- prefix hits

    def num_usable(
        self,
        hashes: Sequence[bytes],
        num_pages: int,
        has: Has | None = None,
    ) -> int:
        """Return how many of the first `num_pages` cached pages end with a whole window."""
        is_known = has or self.pool.index.is_known
        first = end = num_pages  # pages first .. end are available
        while end:
            needed = self.window.first_before(end)
            while first > needed and is_known(hashes[first - 1]):
                first -= 1
            if first == needed:
                return end
            # The missing page is in the window of every end in between.
            first = end = first - 1
        return 0

    def last(self, hashes: Sequence[bytes], num_pages: int) -> Sequence[bytes]:
        """Return the hashes of the window before the end of the first `num_pages` pages."""
        return hashes[self.window.first_before(num_pages) : num_pages]

    # ---- lifecycle of a table

    def begin(self, request: LiveRequest, start: Start) -> None:
        """Begin a table with the window at the end of the cached pages.

        If the request reads from disk, allocate the pages that the window lacks, which must be free.
        """
        if not start.is_reading:
            self._start(request, start.num_pages)
            return
        first, hashes = self.window.first_before(start.num_pages), request.page_hashes
        found = {
            index: self.pool.index.page_of(hashes[index])
            for index in range(first, start.num_pages)
            if self.has(hashes[index])
        }
        self.pool.retain(list(found.values()))
        missing = iter(self._allocate(start.num_pages - first - len(found)))
        pages = [found.get(index) for index in range(first, start.num_pages)]
        window = [next(missing) if page is None else page for page in pages]
        request.window_first, request.window_table = first, as_page_table([0] * first + window)

    def begin_again(self, request: LiveRequest, num_pages: int) -> None:
        self.release(request)
        self._start(request, num_pages)

    def _start(self, request: LiveRequest, num_cached: int) -> None:
        first, hashes = self.window.first_before(num_cached), request.page_hashes[:num_cached]
        found = self.pool.index.match(hashes, request.token_ids, skip=first)
        assert len(found) == num_cached - first, f"{request.id}: a page of its window is lost"
        self.pool.retain(found)
        if num_cached:
            self.ends.begin(request, hashes[-1])
        request.window_first = first
        request.window_table = as_page_table([0] * first + found)

    def grow(self, request: LiveRequest, num_pages: int) -> None:
        table = request.window_table
        is_first = len(table) == request.window_first
        missing = max(0, num_pages - len(table))
        pages = self._allocate(missing, None if is_first else table[-1])
        request.window_table = table + as_page_table(pages)

    def _allocate(self, count: int, after: int | None = None) -> list[int]:
        self.ends.make_room(count)
        pages = self.pool.allocate(count, after)
        assert pages is not None, "as many were free"
        return pages

    def publish(self, request: LiveRequest, first: int, end: int, parent: bytes) -> None:
        """Publish pages; a duplicate stays without a hash, as it is released soon."""
        page_size, kept = self.pool.page_size, self._num_keepers
        for index in range(first, end):
            hash_ = request.page_hashes[index]
            if index >= request.window_first:
                page = request.window_table[index]
                tokens = request.token_ids[index * page_size : (index + 1) * page_size]
                if self.pool.publish(page, hash_, parent, tokens) and hash_ in kept:
                    self.pool.order.keep_until([page], inf)
            parent = hash_

    def pass_by(self, request: LiveRequest, position: int) -> None:
        """Release the pages before `position` that leave the window of its last full page."""
        before, num_pages = request.window_first, position // self.pool.page_size
        first = self.window.first_before(num_pages)
        if first <= before:
            return
        request.window_first = first
        expected: set[int] = set()
        for beginning, end in self._expected_windows(request):
            if beginning < first and before < end:
                if before <= beginning and end <= num_pages:
                    self.ends.add(request.page_hashes, end)
                expected.update(range(max(before, beginning), min(first, end)))
        passed: list[int] = []
        needed: list[int] = []
        for index, page in enumerate(request.window_table[before:first], before):
            # It may be in an end that the request does not expect, as when it pauses for a tool.
            is_needed = index in expected or self.ends.has_page(page)
            (needed if is_needed else passed).append(page)
        if passed:
            self.pool.release(passed)
            self.pool.order.mark_unhit_useless(passed)
        if needed:
            self.pool.release(needed)

    def _expected_windows(self, request: LiveRequest) -> list[tuple[int, int]]:
        """Return the windows before the pages after which another prompt will probably continue."""
        windows = self._expected.get(request)
        if windows is None:
            ends = likely_ends(request, self.pool.page_size)
            windows = [(self.window.first_before(end), end) for end in ends]
            self._expected[request] = windows
        return windows

    def release(self, request: LiveRequest) -> None:
        self._expected.pop(request, None)
        self.pool.order.clock += 1
        num_pages = min(request.num_computed // self.pool.page_size, len(request.page_hashes))
        for end in {*likely_ends(request, self.pool.page_size), num_pages}:
            if request.window_first <= self.window.first_before(end) and end <= num_pages:
                self.ends.add(request.page_hashes, end)
        self.ends.finish(request, request.page_hashes[num_pages - 1] if num_pages else None)
        pages = held(request)
        self.pool.release(pages)
        # Pages in no end's window are evicted first.
        self.pool.order.mark_useless([page for page in pages if not self.ends.has_page(page)])
        request.window_table, request.window_first = as_page_table(), 0

    # ---- followers

    def expect(self, request: LiveRequest, num_pages: int) -> None:
        window = self.window.first_before(num_pages), num_pages
        windows = self._expected_windows(request)
        if window not in windows:
            windows.append(window)

    # ---- the disk

    def used_by(self, request: LiveRequest) -> Uses:
        """Return the windows at the ends of the prompt and of the computed pages, the last page first."""
        num_pages = min(len(request.page_table), len(request.page_hashes))
        likely = likely_ends(request, self.pool.page_size)
        ends = {min(end, num_pages) for end in likely} | {num_pages}
        hashes = request.page_hashes
        kept = {index for end in ends for index in range(self.window.first_before(end), end)}
        return Uses([hashes[index] for index in sorted(kept, reverse=True)])

    def unsaved(self, request: LiveRequest, is_on_disk: Has) -> Units:
        """Return the pages of the window at the end of the last full page that are not on disk."""
        first = request.window_first
        pages = zip(request.page_hashes[first:], request.window_table[first:], strict=False)
        own = [(hash_, page) for hash_, page in pages if self.pool.index.hash_of(page) == hash_]
        return tuple((hash_, page) for hash_, page in own if not is_on_disk(hash_))

    def num_to_read(self, hashes: Sequence[bytes], num_pages: int) -> int:
        return sum(not self.has(hash_) for hash_ in self.last(hashes, num_pages))

    def load(self, request: LiveRequest, end: int) -> Units:
        first, hash_of = request.window_first, self.pool.index.hash_of
        window = zip(request.page_hashes[first:end], request.window_table[first:end], strict=True)
        return tuple((hash_, page) for hash_, page in window if hash_of(page) is None)

    def loaded(self, request: LiveRequest, units: Units, parent: Callable[[int], bytes]) -> None:
        were_read = {hash_ for hash_, _ in units}
        for index in range(request.window_first, request.disk_end):
            if request.page_hashes[index] in were_read:
                self.publish(request, index, index + 1, parent(index))

    # ---- protection from eviction

    def pin(self, prefix: LiveRequest) -> None:
        """Protect the last window of a named prefix."""
        num_full = prefix.num_prompt // self.pool.page_size
        self._kept[prefix.id] = hashes = frozenset(self.last(prefix.page_hashes, num_full))
        self._num_keepers.update(hashes)
        self.pool.order.keep_until(self._known(hashes), inf)
        self.ends.add(prefix.page_hashes, num_full)

    def unpin(self, prefix_id: str) -> None:
        hashes = self._kept.pop(prefix_id, frozenset())
        self._num_keepers.subtract(hashes)
        unkept = [hash_ for hash_ in hashes if not self._num_keepers[hash_]]
        for hash_ in unkept:
            del self._num_keepers[hash_]
        self.pool.order.stop_keeping(self._known(unkept))

    def keep(self, hashes: Sequence[bytes], until: float) -> None:
        """Protect the last whole window of a cached prefix with these hashes until a time in seconds."""
        num_pages = self.num_usable(hashes, len(hashes))
        last = self.last(hashes, num_pages)
        self.pool.order.keep_until(self._known(last), until)
        self.ends.add(hashes, num_pages)

    def expire(self, now: float) -> None:
        self.pool.order.expire(now)

    def forget(self, hashes: Iterable[bytes]) -> None:
        self.pool.forget(hashes)
        self.ends.drop_broken()

    def reset(self) -> None:
        """Evict every page but those of named prefixes. None may be held."""
        kept = self._known(self._num_keepers)
        self.pool.pin(kept)
        is_done = self.pool.reset()
        assert is_done, "a page is held"
        self.pool.unpin(kept)
        self.ends.drop_broken()

    def _known(self, hashes: Iterable[bytes]) -> list[int]:
        """Return the cached pages with these hashes, in an order that is the same in every run."""
        return [
            self.pool.index.page_of(hash_)
            for hash_ in sorted(hashes)
            if self.pool.index.is_known(hash_)
        ]

    def check(self, running: Sequence[LiveRequest], holders: Sequence[LiveRequest]) -> None:  # noqa: ARG002
        self.pool.check([held(request) for request in holders])
        assert self._expected.keys() <= set(holders), "something is expected of no request"
        kept = Counter(hash_ for hashes in self._kept.values() for hash_ in hashes)
        assert self._num_keepers == kept, "a page of a named prefix's window is miscounted"
        for_ever = map(self.pool.index.hash_of, self.pool.order.kept_for_ever())
        assert kept.keys() >= set(for_ever), "a page of a window is kept for no prefix"
        assert not self.pool.num_pinned, "a page of a window is pinned"
        self.ends.check(holders)
        for request in holders:
            name, table, first = request.id, request.window_table, request.window_first
            assert len(table) == max(len(request.page_table), request.disk_end), (
                f"{name} has tables of two lengths"
            )
            num_pages = min(request.num_computed, len(request.token_ids)) // self.pool.page_size
            num_pages = max(num_pages, request.disk_end)
            assert first <= self.window.first_before(num_pages), f"{name} lacks a page it sees"
            for index in range(first, len(table)):
                hash_ = self.pool.index.hash_of(table[index])
                assert hash_ is None or hash_ == request.page_hashes[index], (
                    f"{name} holds a page of a window with other content"
                )

"""Windows: pages of the layers that see the last positions only, in a pool of their own.

A request holds a page of this pool for each of its pages from `window_first` on. Full ones are found by the
same hashes as those of the other layers, and a cached prefix is of use only up to a page before which the
whole window is there.

    passed     no later row of their request sees them: given back while it runs, evicted first of all
    expected   passed as well, but another prompt will probably continue there: where the prompt ended, or
               a follower waits. Evicted as any other page
    kept       the last window of a named prefix, or of a conversation that is about to continue: evicted
               after all others, but before a request goes without

Owns its pool, as the page tables own theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import inf

from mlxserve.cache.groups import Window
from mlxserve.cache.pages import PagePool
from mlxserve.request import LiveRequest, PageTable, as_page_table
from mlxserve.scheduler.state_snapshots import TURN_END


class Windows:
    """Over one pool, which has `num_held` pages of the window or more."""

    def __init__(self, pool: PagePool, window: Window) -> None:
        assert pool.num_pages >= window.num_held, "not even one request would go on"
        assert pool.page_size == window.page_size
        self.pool = pool
        self.window = window
        self._ends: dict[LiveRequest, set[int]] = {}  # pages after which followers will continue
        self._kept: dict[str, frozenset[bytes]] = {}  # the last windows of named prefixes

    def renewed(self) -> Windows:
        """With an empty pool."""
        return Windows(self.pool.renewed(), self.window)

    # ---- what is found

    def num_usable(
        self,
        hashes: Sequence[bytes],
        num_pages: int,
        is_known: Callable[[bytes], bool] | None = None,
    ) -> int:
        """How many of the first `num_pages` pages, which are cached, end with a whole window.

        is_known: whether the page of a window is there; None asks the pool
        """
        is_known = is_known or self.pool.is_known
        first = end = num_pages  # pages first .. end are here
        while end:
            needed = self.window.first_before(end)
            while first > needed and is_known(hashes[first - 1]):
                first -= 1
            if first == needed:
                return end
            first = end = first - 1  # the one that is missing is needed after every later page, too
        return 0

    def last(self, hashes: Sequence[bytes], num_pages: int) -> Sequence[bytes]:
        """Hashes of the window before the end of the first `num_pages` pages."""
        return hashes[self.window.first_before(num_pages) : num_pages]

    # ---- what is needed

    @staticmethod
    def held(request: LiveRequest) -> PageTable:
        return request.window_table[request.window_first :]

    def num_free_for(self, running: Sequence[LiveRequest]) -> int:
        """Free pages that are not reserved: a running prompt needs so many to go on."""
        reserved = 0
        for request in running:
            num_pages = min(-(-request.prefill_end // self.pool.page_size), self.window.num_held)
            reserved += max(0, num_pages - len(request.window_table) + request.window_first)
        return self.pool.num_free - reserved

    def num_needed(self, request: LiveRequest, num_cached: int) -> int:
        """Free pages that a waiting request takes before it gives any back, those it finds included."""
        num_missing = -(-len(request.token_ids) // self.pool.page_size) - num_cached
        found = self._found(request, num_cached)
        return min(num_missing, self.window.num_held - len(found)) + self.pool.num_idle(found)

    def num_growable(self, request: LiveRequest) -> int:
        """By how many pages a prompt may grow: a large chunk takes none that are kept."""
        num_held = len(request.window_table) - request.window_first
        return self._num_growable(num_held, self.pool.num_free, self.pool.num_kept)

    def num_growable_from(self, request: LiveRequest, num_cached: int, num_free: int) -> int:
        """The same of a waiting request that begins after `num_cached` pages, of `num_free` pages."""
        found = self._found(request, num_cached)
        num_kept = self.pool.num_kept - sum(map(self.pool.is_kept_free, found))
        return self._num_growable(len(found), num_free - self.pool.num_idle(found), num_kept)

    def _num_growable(self, num_held: int, num_free: int, num_kept: int) -> int:
        return min(num_free, max(self.window.num_held - num_held, num_free - num_kept))

    def _found(self, request: LiveRequest, num_cached: int) -> list[int]:
        """The pages that it would find if it began after `num_cached` pages."""
        return list(map(self.pool.page_of, self.last(request.page_hashes, num_cached)))

    def num_own(self, request: LiveRequest) -> int:
        """Pages that would be free if the request gave its pages back."""
        return sum(map(self.pool.is_exclusive, self.held(request)))

    # ---- tables begin, grow and end

    def start(self, request: LiveRequest, num_cached: int) -> None:
        """Begin its table with the window before the end of its first `num_cached` pages."""
        first, hashes = self.window.first_before(num_cached), request.page_hashes[:num_cached]
        found = self.pool.match(hashes, request.token_ids, skip=first)
        assert len(found) == num_cached - first, f"{request.id}: a page of its window is lost"
        self.pool.retain(found)
        request.window_first = first
        request.window_table = as_page_table([0] * first + found)

    def start_empty(self, request: LiveRequest, num_pages: int) -> None:
        """Begin its table with the pages for the window before the end of its first `num_pages` pages,
        which is to be read; as many must be free."""
        request.window_first = first = self.window.first_before(num_pages)
        request.window_table = as_page_table([0] * first)
        self.grow(request, num_pages)

    def num_missing(self, request: LiveRequest, num_pages: int) -> int:
        """Pages by which its table has to grow to cover `num_pages` pages."""
        return max(0, num_pages - len(request.window_table))

    def grow(self, request: LiveRequest, num_pages: int) -> None:
        """Make its table cover `num_pages` pages, as many of which must be free as it lacks."""
        table = request.window_table
        is_first = len(table) == request.window_first
        missing = self.num_missing(request, num_pages)
        pages = self.pool.allocate(missing, None if is_first else table[-1])
        assert pages is not None, "as many were free"
        request.window_table = table + as_page_table(pages)

    def publish(self, request: LiveRequest, first: int, end: int, parent: bytes) -> None:
        """As `PageTables.publish`; `parent`: the hash before page `first`. A duplicate stays without a
        hash: it is given back soon."""
        page_size, kept = self.pool.page_size, frozenset[bytes]().union(*self._kept.values())
        for index in range(first, end):
            hash_ = request.page_hashes[index]
            if index >= request.window_first:
                page = request.window_table[index]
                tokens = request.token_ids[index * page_size : (index + 1) * page_size]
                if self.pool.publish(page, hash_, parent, tokens) and hash_ in kept:
                    self.pool.keep_until([page], inf)
            parent = hash_

    def pass_by(self, request: LiveRequest, position: int) -> None:
        """All before `position` is computed and read: give back the pages that no row sees from there on.

        What is needed to go on after the last full page stays: others find it there.
        """
        before, table = request.window_first, request.window_table
        first = self.window.first_before(position // self.pool.page_size)
        if first <= before:
            return
        request.window_first = first
        expected = {index for index in range(before, first) if self.is_expected(request, index)}
        passed = [table[index] for index in range(before, first) if index not in expected]
        self.pool.release_passed(passed)
        self.pool.release([table[index] for index in sorted(expected)])

    def release(self, request: LiveRequest) -> None:
        """Give its pages back."""
        self._ends.pop(request, None)
        self.pool.release(self.held(request))
        request.window_table, request.window_first = as_page_table(), 0

    # ---- what is passed

    def expect(self, request: LiveRequest, num_pages: int) -> None:
        """A follower will continue after the first `num_pages` pages of the request."""
        self._ends.setdefault(request, set()).add(num_pages)

    def is_expected(self, request: LiveRequest, index: int) -> bool:
        """Whether another prompt will probably need page `index` of the request."""
        ends = _ends_of(request, self.pool.page_size) | self._ends.get(request, set())
        return any(self.window.first_before(end) <= index < end for end in ends)

    def worth_keeping(self, request: LiveRequest) -> list[bytes]:
        """Hashes of the windows at the ends of its prompt and of what it has computed, the last first."""
        num_pages = min(len(request.page_table), len(request.page_hashes))
        ends = {min(end, num_pages) for end in _ends_of(request, self.pool.page_size)} | {num_pages}
        hashes = request.page_hashes
        kept = {index for end in ends for index in range(self.window.first_before(end), end)}
        return [hashes[index] for index in sorted(kept, reverse=True)]

    # ---- what is kept

    def pin(self, prefix: LiveRequest) -> None:
        """Keep the last window of a named prefix that was computed, until it is unpinned."""
        num_full = prefix.num_prompt // self.pool.page_size
        self._kept[prefix.id] = frozenset(self.last(prefix.page_hashes, num_full))
        self.pool.keep_until(self._known(self._kept[prefix.id]), inf)

    def unpin(self, prefix_id: str) -> None:
        """No-op if there is no such prefix."""
        hashes = self._kept.pop(prefix_id, frozenset())
        self.pool.stop_keeping(self._known(hashes.difference(*self._kept.values())))

    def keep(self, hashes: Sequence[bytes], until: float) -> None:
        """Protect the last window that is here of a prefix of cached pages with these hashes."""
        last = self.last(hashes, self.num_usable(hashes, len(hashes)))
        self.pool.keep_until(self._known(last), until)

    def expire(self, now: float) -> None:
        """As `PagePool.expire`."""
        self.pool.expire(now)

    def forget(self, hashes: Iterable[bytes]) -> None:
        """As `PagePool.forget`."""
        self.pool.forget(hashes)

    def reset(self) -> None:
        """Forget every page but those of named prefixes. None may be held."""
        kept = self._known(frozenset[bytes]().union(*self._kept.values()))
        self.pool.pin(kept)
        is_done = self.pool.reset()
        assert is_done, "a page is held"
        self.pool.unpin(kept)

    def _known(self, hashes: Iterable[bytes]) -> list[int]:
        """Pages, in an order that does not differ between two runs."""
        return [self.pool.page_of(hash_) for hash_ in sorted(hashes) if self.pool.is_known(hash_)]

    def check(self, holders: Sequence[LiveRequest]) -> None:
        """Audit. Raises AssertionError."""
        self.pool.check([self.held(request) for request in holders])
        assert self._ends.keys() <= set(holders), "something is expected of no request"
        for request in holders:
            name, table, first = request.id, request.window_table, request.window_first
            assert len(table) == max(len(request.page_table), request.disk_end), (
                f"{name} has tables of two lengths"
            )
            num_pages = min(request.num_computed, len(request.token_ids)) // self.pool.page_size
            num_pages = max(num_pages, request.disk_end)
            assert first <= self.window.first_before(num_pages), f"{name} lacks a page it sees"
            for index in range(first, len(table)):
                hash_ = self.pool.hash_of(table[index])
                assert hash_ is None or hash_ == request.page_hashes[index], (
                    f"{name} holds a page of a window with other content"
                )


def _ends_of(request: LiveRequest, page_size: int) -> set[int]:
    """Pages of its prompt after which another one will probably continue."""
    end = request.prefill_end
    return {max(0, end - 1) // page_size, max(0, end - TURN_END) // page_size}

"""EvictionOrder and EvictionLog: which cached page is evicted next, and which ones were.

Classes of cached pages, in the order of eviction, least recently used first within each:

    useless no sequence needs it now: evicted before all others
    normal
    hot     hit twice or more; at most half of the pool, so that new pages are not starved
    kept    protected until a given time, as for a conversation that will probably continue

A page is hit and kept only with the pages before it, so a prefix is evicted from its end.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from heapq import heappop, heappush
from itertools import chain, islice
from math import inf

HOT_AFTER = 2  # hits, by default
_MAX_REMEMBERED = 256  # evicted page ids, for callers that cache what they matched between steps


class EvictionOrder:
    """Cached pages without a holder, among ids 0 .. `num_pages`-1."""

    def __init__(self, num_pages: int, hot_after: int = HOT_AFTER) -> None:
        """Begin empty; pages become hot after `hot_after` hits."""
        assert hot_after > 0
        self.hot_after = hot_after
        # From a page to the time at which it was filed, as `clock` counts it.
        self.useless: OrderedDict[int, int] = OrderedDict()
        self.normal: OrderedDict[int, int] = OrderedDict()
        self.hot: OrderedDict[int, int] = OrderedDict()
        self.kept: OrderedDict[int, int] = OrderedDict()
        self.classes = (self.useless, self.normal, self.hot, self.kept)
        self.clock = 0  # requests that have ended: the unit in which the age of pages is counted
        self._max_hot = num_pages // 2
        self._hits = [0] * num_pages  # of hashed pages; `_demote` lowers them
        self._kept_until: dict[int, float] = {}
        # Heap of (time, number, page). Entries are stale if the page is kept longer, or no longer kept.
        self._expiries: list[tuple[float, int, int]] = []
        self._num_expiries = 0  # in total, to order those of the same time

    @property
    def num_kept(self) -> int:
        """Number of free pages that are protected for some time."""
        return len(self.kept)

    def is_kept_free(self, page: int) -> bool:
        """Return True for one of the `num_kept` pages."""
        return page in self.kept

    def is_kept(self, page: int | None) -> bool:
        """Return True for a page protected by `keep_until`, free or not."""
        return page in self._kept_until

    def is_evictable(self, page: int | None) -> bool:
        """Return True for a free page that is neither kept nor useless."""
        return page in self.normal or page in self.hot

    def __iter__(self) -> Iterator[int]:
        """Yield the pages in the order of eviction."""
        return chain.from_iterable(self.classes)

    def first(self, count: int | None = None) -> list[int]:
        """Return up to `count` pages in the order of eviction."""
        return list(islice(self, count))

    # ---- pages come and go

    def file(self, pages: Iterable[int]) -> None:
        """File free pages, in this order."""
        hits = self._hits
        normal, hot, kept = self.normal, self.hot, self.kept
        clock = self.clock
        for page in pages:
            if page in self._kept_until:
                kept[page] = clock
            elif hits[page] < self.hot_after:
                normal[page] = clock
            else:
                hot[page] = clock
                if len(hot) > self._max_hot:
                    self._demote()

    def _demote(self) -> None:
        """Make the least recently used hot page normal; one more hit makes it hot again."""
        page, clock = self.hot.popitem(last=False)
        self._hits[page] = self.hot_after - 1
        self.normal[page] = clock

    def mark_unhit_useless(self, pages: Sequence[int]) -> None:
        """Mark those of these pages as useless that are normal and were never hit."""
        for page in pages:
            if page in self.normal and not self._hits[page]:
                self.useless[page] = self.normal.pop(page)

    def mark_useless(self, pages: Sequence[int]) -> None:
        """Mark pages as useless, unless they are kept: they are evicted next, in this order."""
        for page in pages:
            for others in (self.normal, self.hot):
                if page in others:
                    self.useless[page] = others.pop(page)

    def unmark_useless(self, pages: Iterable[int]) -> None:
        """File those of these pages anew that were marked as useless."""
        for page in pages:
            if page in self.useless:
                del self.useless[page]
                self.file([page])

    def unfile(self, page: int) -> bool:
        """Remove a page, and return True if it was filed."""
        for pages in self.classes:
            if page in pages:
                del pages[page]
                return True
        return False

    def use(self, pages: Iterable[int], idle: Iterable[int]) -> None:
        """Count a hit of each page, and remove the `idle` ones, which are filed."""
        # Prefixes have thousands of pages: a call for each of them would triple the time.
        hits, classes = self._hits, self.classes[1:]
        for page in idle:
            for others in classes:
                if page in others:
                    del others[page]
                    break
            else:
                del self.useless[page]
        for page in pages:
            hits[page] += 1

    def pop(self) -> int:
        """Remove and return the page to evict next; there must be one."""
        for pages in self.classes:
            if pages:
                break
        return pages.popitem(last=False)[0]

    def forget(self, page: int) -> None:
        """Forget the hits and the protection of a page whose content is gone."""
        self._kept_until.pop(page, None)
        self._hits[page] = 0

    # ---- protection

    def keep_until(self, pages: Sequence[int], until: float) -> None:
        """Protect the pages of a prefix, from its first page on, until a time in seconds."""
        for page in reversed(pages):
            before = self._kept_until.get(page)
            if before is None or before < until:
                self._kept_until[page] = until
                self._expire_at(until, page)
            if self.unfile(page):
                self.file([page])

    def _expire_at(self, until: float, page: int) -> None:
        if until < inf:
            self._num_expiries += 1
            heappush(self._expiries, (until, self._num_expiries, page))

    def expire(self, now: float) -> None:
        """End the protections that have expired at `now`, in seconds."""
        if not self._expiries or self._expiries[0][0] > now:
            return
        expired = []
        while self._expiries and self._expiries[0][0] <= now:
            until, _, page = heappop(self._expiries)
            if self._kept_until.get(page) == until:
                expired.append(page)
        self.stop_keeping(expired)

    def kept_for_ever(self) -> list[int]:
        """Return the pages that no time ends the protection of."""
        return [page for page, until in self._kept_until.items() if until == inf]

    def stop_keeping(self, pages: Iterable[int]) -> None:
        """End the protection of these pages, and file those that are free, in this order."""
        for page in pages:
            if self._kept_until.pop(page, None) is not None and page in self.kept:
                del self.kept[page]
                self.file([page])

    # ---- the whole

    def move(self, targets: Mapping[int, int]) -> None:
        """Change the ids of pages from the keys to the values of `targets`."""
        for pages in self.classes:
            if not targets.keys().isdisjoint(pages):
                moved = {targets.get(page, page): clock for page, clock in pages.items()}
                pages.clear()
                pages.update(moved)
        for page, target in targets.items():
            self._hits[target], self._hits[page] = self._hits[page], 0
            if (until := self._kept_until.pop(page, None)) is not None:
                self._kept_until[target] = until
                self._expire_at(until, target)

    def grow(self, num_pages: int) -> None:
        """Extend the ids to 0 .. `num_pages`-1."""
        self._hits += [0] * (num_pages - len(self._hits))
        self._max_hot = num_pages // 2

    def check(self) -> None:
        """Audit the invariants. Raises AssertionError."""
        normal, hot, kept = self.normal, self.hot, self.kept
        assert all(self._hits[page] < self.hot_after for page in normal), (
            "a hot page is filed as normal"
        )
        assert all(self._hits[page] >= self.hot_after for page in hot), (
            "a normal page is filed as hot"
        )
        assert len(hot) <= self._max_hot, "too many pages are hot"
        assert kept.keys() <= self._kept_until.keys(), "a kept page has no time"
        assert not self._kept_until.keys() & (self.useless.keys() | normal.keys() | hot.keys()), (
            "a page with a time is not filed as kept"
        )
        due = {(until, page) for page, until in self._kept_until.items() if until < inf}
        assert due <= {(until, page) for until, _, page in self._expiries}, (
            "a kept page does not expire"
        )


class EvictionLog:
    """The pages evicted last: ids for callers that cache matches, hashes for reports."""

    def __init__(self, num_hashes: int, count: int = 0) -> None:
        """Begin empty; remember at most `num_hashes` hashes."""
        self.num_hashes = num_hashes
        self.count = count  # in total, including moved pages
        self.num_moved = 0
        self._pages: deque[int] = deque(maxlen=_MAX_REMEMBERED)
        self._hashes: OrderedDict[bytes, None] = OrderedDict()

    def add(self, page: int, hash_: bytes) -> None:
        self._hashes[hash_] = None
        if len(self._hashes) > self.num_hashes:
            self._hashes.popitem(last=False)
        self._pages.append(page)
        self.count += 1

    def add_moved(self, page: int) -> None:
        """Log a page whose content has moved to another: cached matches with it are stale."""
        self._pages.append(page)
        self.count += 1
        self.num_moved += 1

    def discard(self, hash_: bytes) -> None:
        """Forget a hash whose content is cached again."""
        self._hashes.pop(hash_, None)

    def has(self, hash_: bytes) -> bool:
        """Return True for one of the hashes evicted last."""
        return hash_ in self._hashes

    def since(self, count: int) -> list[int] | None:
        """Return the pages evicted since `count` had this value; None if not all are remembered."""
        num_evicted = self.count - count
        if num_evicted > len(self._pages):
            return None
        return list(islice(reversed(self._pages), num_evicted))

    def is_disjoint(self, hashes: Collection[bytes]) -> bool:
        """Return True if none of these hashes is remembered, as must hold for cached ones."""
        return self._hashes.keys().isdisjoint(hashes)

"""PagePool: which pages of the KV cache are free, shared, or findable by their hash.

Owns page ids, reference counts, hashes and the eviction order. Knows neither the arrays that hold
the pages nor requests.

    blank   free, no hash         allocated first: nothing is lost
    cached  free, with a hash     evicted next, by class; a hit retains it
    used    held by at least one page table, with or without a hash
    pinned  with a hash, never evicted, whether held or not

Classes of cached pages, in the order of eviction, least recently used first within each:

    normal
    hot     hit twice or more; at most half of the pool, so that new pages are not starved
    kept    protected until a given time, as for a conversation that will probably continue

A page is hit and kept only with the pages before it, so a prefix is never evicted before its end.
A page is written only by its single holder, before it is published, and only read afterwards.
A tail is a page that was published before it was full. It is never matched, because a request that
continues from it would write to it. It is copied instead.
"""

from __future__ import annotations

import struct
from collections import Counter, OrderedDict, deque
from collections.abc import Collection, Iterable, Sequence
from enum import IntEnum
from itertools import chain, islice
from typing import cast

from mlxserve.cache.hashing import page_hash, token_bytes
from mlxserve.cache.radix import Children
from mlxserve.cache.runs import RunSet

HOT_AFTER = 2  # hits, by default
_MAX_REMEMBERED = 256  # evicted page ids, for callers that cache what they matched between steps
_NEARLY_USED = 4  # pages of which one is blank: from then on more will be opened soon
_MAX_COMPARED = 8  # pages that a new one is compared with to find where they differ


class PageState(IntEnum):
    """A page's state as statistics and screens show it: exactly one of these."""

    FREE = 0  # blank
    ACTIVE = 1  # one holder
    SHARED = 2  # several holders
    CACHED = 3  # no holder, but findable by its hash
    PINNED = 4  # never evicted, held or not
    STORED = 5  # cached, and on disk as well; the pool itself does not know


class PagePool:
    """`num_pages` pages of `page_size` token slots each.

    Every operation but `grow` takes time in proportion to the pages it handles, not to the pool.

    Only the first `num_open` ids have been allocated so far, so memory for the others can wait. They
    are free pages as all others; before a page is evicted, half as many ids again are opened.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        hot_after: int = HOT_AFTER,
        num_open: int | None = None,
    ) -> None:
        """`hot_after`: number of hits after which a page is hot; `num_open`: None opens all."""
        assert num_pages > 0
        assert num_open is None or 0 < num_open <= num_pages
        assert page_size > 0
        assert hot_after > 0
        self.hot_after = hot_after
        self.num_pages = num_pages
        self.num_open = num_open or num_pages
        self._first_open = num_open
        self.page_size = page_size
        self._max_hot = num_pages // 2
        self.num_evicted = 0  # cached pages, in total
        self.num_published = 0
        self.num_duplicates = 0  # not published, because another page has the same content
        self._ref_counts = [0] * num_pages
        self._hashes: list[bytes | None] = [None] * num_pages
        self._parents: list[bytes] = [b""] * num_pages  # hash of the page before; of hashed pages
        self._tokens: list[bytes] = [b""] * num_pages  # in the page; of hashed pages
        self._page_of: dict[bytes, int] = {}
        self._children = Children(num_pages)  # hashed pages by their parents' hashes
        self._tails = Children(num_pages)  # those that are not full
        self._last_evicted: deque[int] = deque(maxlen=_MAX_REMEMBERED)
        self._evicted: OrderedDict[bytes, None] = OrderedDict()  # hashes of the last evicted pages
        self._pin_counts: dict[int, int] = {}
        self._blank = RunSet(self.num_open)
        self._cached: tuple[OrderedDict[int, None], ...] = tuple(OrderedDict() for _ in range(3))
        self._hits = [0] * num_pages  # of hashed pages; `_demote` lowers them
        self._kept_until: dict[int, float] = {}

    @property
    def num_free(self) -> int:
        """Pages that `allocate` can return: blank and cached ones."""
        num_blank = self._blank.count + self.num_pages - self.num_open
        return num_blank + sum(map(len, self._cached))

    @property
    def num_used(self) -> int:
        """Pages that are held or pinned."""
        return self.num_pages - self.num_free

    @property
    def num_pinned(self) -> int:
        return len(self._pin_counts)

    @property
    def num_hot(self) -> int:
        """Cached pages that are evicted after normal ones because they were hit often."""
        return len(self._cached[1])

    @property
    def num_kept(self) -> int:
        """Free pages that are protected for some time."""
        return len(self._cached[2])

    def is_kept_free(self, page: int) -> bool:
        """Whether it is one of `num_kept`."""
        return page in self._cached[2]

    @property
    def num_cached(self) -> int:
        """Pages findable by hash, whether free or in use."""
        return len(self._page_of)

    def states(self) -> bytes:
        """The `PageState` of every page, a byte each.

        Computed with plain integers: 0.9 ms for 20,000 pages, instead of 25 ms with enum members.
        """
        shared, cached, pinned = map(int, (PageState.SHARED, PageState.CACHED, PageState.PINNED))
        states = bytearray([count if count < shared else shared for count in self._ref_counts])
        for page in chain.from_iterable(self._cached):
            states[page] = cached
        for page in self._pin_counts:
            states[page] = pinned
        return bytes(states)

    @property
    def num_blank(self) -> int:
        """Pages that can be allocated without evicting one."""
        return len(self._blank) + self.num_pages - self.num_open

    def eviction_order(self, count: int | None = None) -> list[int]:
        """Cached pages, next to be evicted first; `count`: the maximum number."""
        return list(islice(chain.from_iterable(self._cached), count))

    def pinned(self) -> list[int]:
        """Pages of named prefixes, the first to be pinned first."""
        return list(self._pin_counts)

    def is_full(self, page: int) -> bool:
        """Whether it can be found, and is not a tail."""
        return len(self._tokens[page]) == 4 * self.page_size

    def hash_of(self, page: int) -> bytes | None:
        return self._hashes[page]

    def ref_count(self, page: int) -> int:
        return self._ref_counts[page]

    def is_exclusive(self, page: int) -> bool:
        """Whether it has one holder and becomes free when that one releases it."""
        return self._ref_counts[page] == 1 and page not in self._pin_counts

    def is_known(self, hash_: bytes) -> bool:
        return hash_ in self._page_of

    def page_of(self, hash_: bytes) -> int:
        """The page with this hash. Raises KeyError."""
        return self._page_of[hash_]

    def was_evicted(self, hash_: bytes) -> bool:
        """Whether this is among the hashes evicted last; as many are remembered as pages exist."""
        return hash_ in self._evicted

    def evicted_since(self, num_evicted: int) -> list[int] | None:
        """Pages evicted since `self.num_evicted` had this value; None if not all are remembered."""
        count = self.num_evicted - num_evicted
        if count > len(self._last_evicted):
            return None
        return list(islice(reversed(self._last_evicted), count))

    def num_unchanged(self, pages: Sequence[int], hashes: Sequence[bytes]) -> int:
        """Number of leading pages that still have these hashes."""
        now = list(map(self._hashes.__getitem__, pages))
        if now == hashes[: len(now)]:
            return len(now)
        return next(
            i for i, (one, other) in enumerate(zip(now, hashes, strict=False)) if one != other
        )

    def num_common(self, parent: bytes, token_ids: Sequence[int]) -> int:
        """Number of leading tokens in common with the most similar recent page after `parent`."""
        wanted = token_bytes(token_ids)
        newest = islice(self._children.children_of(parent), _MAX_COMPARED)
        return max((_num_common(self._tokens[page], wanted) for page in newest), default=0)

    def is_pinned(self, hash_: bytes) -> bool:
        return self._page_of.get(hash_) in self._pin_counts

    def is_kept(self, hash_: bytes) -> bool:
        """Whether the page is protected for some time (`keep_until`)."""
        return self._page_of.get(hash_) in self._kept_until

    def num_idle(self, pages: Iterable[int]) -> int:
        """How many of `pages` are free: retaining them all lowers `num_free` by this number."""
        counts = self._ref_counts
        if not self._pin_counts:
            return list(map(counts.__getitem__, pages)).count(0)
        unheld = [page for page in pages if not counts[page]]
        return len(unheld) - len(self._pin_counts.keys() & unheld)

    def match(self, hashes: Sequence[bytes], token_ids: Sequence[int], skip: int = 0) -> list[int]:
        """The pages of the longest cached prefix of `hashes`, without the first `skip` pages.

        Valid until the next `allocate` or `reset`: retain the pages before that. Token ids are
        compared too, so even a hash collision never gives a prompt the pages of another one.
        """
        if skip >= len(hashes) or hashes[skip] not in self._page_of:
            return []  # the usual case: waiting requests are matched again and again
        found = list(map(self._page_of.get, islice(hashes, skip, None)))
        num_found = found.index(None) if None in found else len(found)
        pages = cast(list[int], found[:num_found])
        start = skip * self.page_size
        wanted = token_bytes(token_ids[start : start + num_found * self.page_size])
        held = [self._tokens[page] for page in pages]
        if b"".join(held) == wanted:  # one comparison: one per page took five times as long
            return pages
        size = 4 * self.page_size
        starts = range(0, len(wanted), size)
        are_same = [tokens == wanted[i : i + size] for tokens, i in zip(held, starts, strict=True)]
        return pages[: are_same.index(False)]

    def find_tail(self, parent: bytes, token_ids: Sequence[int]) -> tuple[int, int] | None:
        """(page, number of common tokens) of the best tail after `parent`; None if there is none.

        Its tokens begin with these ids, or the other way round. Valid as long as a match.
        """
        if not self._tails.has(parent):
            return None
        wanted = token_bytes(token_ids)
        found = [
            (min(len(held), len(wanted)) // 4, page)
            for page in self._tails.children_of(parent)
            if (held := self._tokens[page]).startswith(wanted) or wanted.startswith(held)
        ]
        num_tokens, page = max(found, default=(0, 0))
        return (page, num_tokens) if num_tokens else None

    def retain(self, pages: Iterable[int]) -> None:
        """Add a holder that found these pages by their hashes, and count a hit for each page."""
        # Prefixes have thousands of pages: a call for each of them would triple the time.
        counts, pins, hits = self._ref_counts, self._pin_counts, self._hits
        normal, hot, kept = self._cached
        for page in pages:
            if counts[page] or page in pins:
                pass
            elif page in kept:
                del kept[page]
            elif hits[page] < self.hot_after:
                del normal[page]
            else:
                del hot[page]
            counts[page] += 1
            hits[page] += 1

    def share(self, pages: Iterable[int]) -> None:
        """Add a holder that got these pages from another holder.

        Counts no hit: pages without a hash are shared too, and hits on a duplicate would make the
        end of a prefix hot but not its beginning.
        """
        for page in pages:
            assert self._ref_counts[page] > 0, f"page {page} is shared, but has no holder"
            self._ref_counts[page] += 1

    def adopt(self, hash_: bytes) -> int:
        """Add a holder, which computed the same content, to the page with this hash; return it.

        Counts no hit: the same request may have published the pages before it, which have none.
        """
        page = self._page_of[hash_]
        if self._is_free(page):
            self._unfile(page)
        self._ref_counts[page] += 1
        return page

    def allocate(self, num_pages: int, after: int | None = None) -> list[int] | None:
        """Pages for one holder to write, in runs; None without any change if too few are free.

        `after` is the holder's last page so far: the pages that follow it are preferred.
        """
        if num_pages > self.num_free:
            return None
        # Evict no more than needed. Evicting 1/32 of the pool ahead lowers the number of runs in a
        # full pool from 81 to 50 in tables of 97 pages, but loses pages that would be hit.
        self._open(num_pages - len(self._blank))
        while len(self._blank) < num_pages:
            self._evict()
        pages = self._blank.take(num_pages, after)
        for page in pages:
            self._ref_counts[page] = 1
        return pages

    def _open(self, num_missing: int) -> None:
        """Open ids for this many pages, if there are any; more, as growing copies what is there."""
        if num_missing <= 0 or self.num_open == self.num_pages:
            return
        num_open = min(self.num_pages, max(self.num_open + num_missing, self._next_open))
        self._blank.extend(self.num_open, num_open - self.num_open)
        self.num_open = num_open

    @property
    def _next_open(self) -> int:
        return min(self.num_pages, self.num_open * 3 // 2)

    @property
    def open_soon(self) -> int | None:
        """Ids that will be open once the blank ones are used, if most of them are; None otherwise."""
        is_soon = len(self._blank) * _NEARLY_USED < self.num_open < self.num_pages
        return self._next_open if is_soon else None

    def publish(self, page: int, hash_: bytes, parent: bytes, token_ids: Sequence[int]) -> bool:
        """Make a full page findable, after the step that computed it: hits read it immediately.

        False if another page has the same content: this one stays unhashed, and its holder may
        `adopt` the other.
        """
        assert len(token_ids) == self.page_size, f"page {page} is published, but not full"
        return self._publish(page, hash_, parent, token_ids)

    def publish_tail(
        self, page: int, hash_: bytes, parent: bytes, token_ids: Sequence[int]
    ) -> bool:
        """Make a page with fewer than `page_size` tokens findable; it must not get any more."""
        assert 0 < len(token_ids) < self.page_size, f"page {page} is not a tail: full or empty"
        is_new = self._publish(page, hash_, parent, token_ids)
        if is_new:
            self._tails.add(parent, page)
        return is_new

    def _publish(self, page: int, hash_: bytes, parent: bytes, token_ids: Sequence[int]) -> bool:
        assert self._ref_counts[page] > 0, f"page {page} is published, but has no holder"
        assert self._hashes[page] is None, f"page {page} is published twice"
        if hash_ in self._page_of:
            self.num_duplicates += 1
            return False
        self._page_of[hash_] = page
        self._children.add(parent, page)
        self._evicted.pop(hash_, None)
        self._hashes[page] = hash_
        self._parents[page] = parent
        self._tokens[page] = token_bytes(token_ids)
        self.num_published += 1
        return True

    def release(self, pages: Sequence[int]) -> None:
        """Remove a holder of each page, last page first: an end is useless without its prefix."""
        counts = self._ref_counts
        freed: list[int] = []
        for page in reversed(pages):
            count = counts[page] - 1
            assert count >= 0, f"page {page} is released, but has no holder"
            counts[page] = count
            if not count:
                freed.append(page)
        self._free(freed)

    def release_passed(self, pages: Sequence[int]) -> None:
        """As `release`; those that were never hit are evicted before all others, the first one first."""
        self.release(pages)
        normal = self._cached[0]
        for page in reversed(pages):
            if page in normal and not self._hits[page]:
                normal.move_to_end(page, last=False)

    def pin(self, pages: Iterable[int]) -> None:
        """Never evict these pages until each is unpinned as often as it was pinned."""
        for page in pages:
            assert self._hashes[page] is not None, f"page {page} is pinned, but has no hash"
            if self._is_free(page):
                self._unfile(page)
            self._pin_counts[page] = self._pin_counts.get(page, 0) + 1

    def unpin(self, pages: Sequence[int]) -> None:
        """Remove a pin of each page, last page first as in `release`."""
        for page in reversed(pages):
            self._pin_counts[page] -= 1
            if self._pin_counts[page] == 0:
                del self._pin_counts[page]
                self._free([page])

    def keep_until(self, pages: Sequence[int], until: float) -> None:
        """Evict these pages after all others until then. `pages`: a prefix from its first page."""
        for page in reversed(pages):
            assert self._hashes[page] is not None, f"page {page} is kept, but has no hash"
            self._kept_until[page] = max(until, self._kept_until.get(page, until))
            if self._is_free(page):
                self._unfile(page)
                self._free([page])

    def expire(self, now: float) -> None:
        """End the protection of pages that were kept until `now` or earlier."""
        expired = {page for page, until in self._kept_until.items() if until <= now}
        if expired:
            self.stop_keeping(expired)

    def stop_keeping(self, pages: Collection[int]) -> None:
        """End the protection of those of these pages that have one."""
        for page in pages:
            self._kept_until.pop(page, None)
        _, _, kept = self._cached
        for page in [page for page in kept if page in pages]:
            self._unfile(page)
            self._free([page])

    def reset(self) -> bool:
        """Evict every cached page but the pinned ones; False without any change if one is held."""
        if self.num_used > sum(self._ref_counts[page] == 0 for page in self._pin_counts):
            return False
        while any(self._cached):
            self._evict()
        return True

    def forget(self, hashes: Iterable[bytes]) -> list[bytes]:
        """Evict the cached pages with these hashes and all pages after them, the last ones first; the
        hashes of those that were evicted. Pages that are held or pinned stay."""
        seen: dict[bytes, None] = {}  # each after those before it
        following = list(hashes)
        while following:
            hash_ = following.pop()
            if hash_ not in seen:
                seen[hash_] = None
                following += filter(None, map(self.hash_of, self._children.children_of(hash_)))
        found = [
            h for h in reversed(seen) if h in self._page_of and self._is_free(self._page_of[h])
        ]
        for hash_ in found:
            page = self._page_of[hash_]
            self._unfile(page)
            self._blank_out(page)
        return found

    def renewed(self, num_pages: int | None = None) -> PagePool:
        """An empty pool, of the same size by default, whose counters go on."""
        num_pages = num_pages or self.num_pages
        num_open = self._first_open and min(self._first_open, num_pages)
        pool = PagePool(num_pages, self.page_size, self.hot_after, num_open)
        pool.num_evicted = self.num_evicted
        pool.num_published = self.num_published
        pool.num_duplicates = self.num_duplicates
        return pool

    def grow(self, num_pages: int) -> None:
        """Have `num_pages` pages, no fewer than before. Takes time in proportion to their number."""
        num_new = num_pages - self.num_pages
        assert num_new >= 0, "a pool does not shrink"
        if num_new and self.num_open == self.num_pages:
            self._blank.extend(self.num_pages, num_new)
            self.num_open = num_pages
        for counts in (self._ref_counts, self._hits):
            counts += [0] * num_new
        self._hashes += [None] * num_new
        for contents in (self._parents, self._tokens):
            contents += [b""] * num_new
        for children in (self._children, self._tails):
            children.grow(num_pages)
        self.num_pages = num_pages
        self._max_hot = num_pages // 2

    def check(self, tables: Iterable[Sequence[int]] | None = None) -> None:
        """Audit every invariant; `tables` are all live page tables. Raises AssertionError."""
        self._blank.check()
        blank = {page for first, n in self._blank.runs() for page in range(first, first + n)}
        assert max(blank, default=0) < self.num_open, "a page is blank that is not open"
        blank.update(range(self.num_open, self.num_pages))
        cached = Counter(self.eviction_order())
        assert not blank & cached.keys(), "a page is both blank and cached"
        assert cached.total() == len(cached), "a page is cached in two classes"
        self._check_classes()
        for page, ref_count in enumerate(self._ref_counts):
            hashed = self._hashes[page] is not None
            pinned = page in self._pin_counts
            assert ref_count >= 0, f"page {page} has {ref_count} holders"
            assert not pinned or (hashed and self._pin_counts[page] > 0), (
                f"page {page} is pinned without a hash or a pin"
            )
            assert (page in blank) == (ref_count == 0 and not hashed), (
                f"page {page} is blank: {page in blank}, with {ref_count} holders"
            )
            assert (page in cached) == (ref_count == 0 and hashed and not pinned), (
                f"page {page} is cached: {page in cached}, with {ref_count} holders"
            )
        self._check_index()
        if tables is not None:
            held = Counter(chain.from_iterable(tables))
            assert max(held, default=0) < self.num_pages, (
                "a page table names a page outside the pool"
            )
            for page, ref_count in enumerate(self._ref_counts):
                assert held[page] == ref_count, (
                    f"page {page} is in {held[page]} page tables, but counts {ref_count} holders"
                )

    def _check_classes(self) -> None:
        normal, hot, kept = self._cached
        assert all(self._hits[page] < self.hot_after for page in normal), (
            "a hot page is filed as normal"
        )
        assert all(self._hits[page] >= self.hot_after for page in hot), (
            "a normal page is filed as hot"
        )
        assert len(hot) <= self._max_hot, "too many pages are hot"
        assert kept.keys() <= self._kept_until.keys(), "a kept page has no time"
        assert not self._kept_until.keys() & (normal.keys() | hot.keys()), (
            "a page with a time is not filed as kept"
        )

    def _check_index(self) -> None:
        hashed = {page: h for page, h in enumerate(self._hashes) if h is not None}
        assert self._page_of == {h: page for page, h in hashed.items()}, "hashes and index disagree"
        for page, h in hashed.items():
            tokens = struct.unpack(f"<{len(self._tokens[page]) // 4}i", self._tokens[page])
            parent = self._parents[page]
            is_known = parent and min(tokens) >= 0  # what images add to a hash is not kept here
            assert not is_known or page_hash(parent, tokens) == h, f"page {page} has a wrong hash"

        self._children.check()
        self._tails.check()
        assert set(self._children.filed()) == {(self._parents[page], page) for page in hashed}, (
            "a page is filed under another parent"
        )
        tails = [page for page in hashed if len(self._tokens[page]) < 4 * self.page_size]
        assert set(self._tails.filed()) == {(self._parents[page], page) for page in tails}, (
            "a tail is filed under another parent"
        )
        assert not self._evicted.keys() & self._page_of.keys(), "a hash is both cached and evicted"

    def _is_free(self, page: int) -> bool:
        return self._ref_counts[page] == 0 and page not in self._pin_counts

    def _free(self, pages: Iterable[int]) -> None:
        """File those of these pages that are neither held nor pinned, in this order."""
        counts, pins, hashes, hits = self._ref_counts, self._pin_counts, self._hashes, self._hits
        normal, hot, kept = self._cached
        for page in pages:
            if counts[page] or page in pins:
                pass
            elif hashes[page] is None:
                self._blank.add(page)
            elif page in self._kept_until:
                kept[page] = None
            elif hits[page] < self.hot_after:
                normal[page] = None
            else:
                hot[page] = None
                if len(hot) > self._max_hot:
                    self._demote()

    def _demote(self) -> None:
        """Make the least recently used hot page normal; one more hit makes it hot again."""
        normal, hot, _ = self._cached
        page, _ = hot.popitem(last=False)
        self._hits[page] = self.hot_after - 1
        normal[page] = None

    def _unfile(self, page: int) -> None:
        for pages in self._cached:
            if page in pages:
                del pages[page]
                return

    def _evict(self) -> None:
        page, _ = next(pages for pages in self._cached if pages).popitem(last=False)
        self._blank_out(page)

    def _blank_out(self, page: int) -> None:
        """A cached page, which is filed in no class any more, becomes blank."""
        hash_ = self._hashes[page]
        assert hash_ is not None
        del self._page_of[hash_]
        self._children.remove(self._parents[page], page)
        if len(self._tokens[page]) < 4 * self.page_size:
            self._tails.remove(self._parents[page], page)
        self._evicted[hash_] = None
        if len(self._evicted) > self.num_pages:
            self._evicted.popitem(last=False)
        self._kept_until.pop(page, None)
        self._hits[page] = 0
        self._hashes[page] = None
        self._parents[page] = self._tokens[page] = b""
        self._blank.add(page)
        self._last_evicted.append(page)
        self.num_evicted += 1


def _num_common(held: bytes, wanted: bytes) -> int:
    """Number of leading tokens, of four bytes each, that two pages have in common."""
    size = min(len(held), len(wanted))
    starts = range(0, size, 4)
    return next((i // 4 for i in starts if held[i : i + 4] != wanted[i : i + 4]), size // 4)

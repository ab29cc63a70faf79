"""PageTables: the pages that requests hold.

The only module that changes the page pool; the units of other layers belong to their `EndKind`.

    start, fork ──▶ grow ──▶ publish ──▶ grow ──▶ publish ... ──▶ release
    cached pages,   free     pages that a step completed          now, or when the last unread
    or a leader's   pages    are findable by their hashes         step that uses them is read

Pages are also held by

    copies      the source of a copy, until it is copied
    pins        the pages of named prefixes (`Pins`)
    duplicates  a request's own page, given up for one with the same content that another request
                published first: until the unread step that uses it is read

Decides nothing: which requests run, and which one is preempted, is up to the scheduler.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from typing import NamedTuple

from mlxserve.cache.kinds.full_pages import FullPages
from mlxserve.cache.kinds.kind import EndKind, Start, UnitKind
from mlxserve.cache.pages import PagePool
from mlxserve.core.config import PageTail, SchedulerConfig
from mlxserve.core.stats import SchedulerStats
from mlxserve.request import LiveRequest, as_page_table
from mlxserve.scheduler.audit import check_ending, check_foresight, check_running
from mlxserve.scheduler.capacity import Capacity
from mlxserve.scheduler.disk_pages import LOAD_PAGES, Disk, DiskPages, Load, Save
from mlxserve.scheduler.pins import Pins
from mlxserve.scheduler.prefix_cache import PrefixCache, Tail


class Reading(NamedTuple):
    """How far a request gets with what it reads from disk.

    base: pages that it can continue after if nothing is read
    reach: pages that it can continue after once it has been read
    """

    base: int
    reach: int


@dataclass(frozen=True, slots=True)
class PageCopy:
    """Make page `target` hold what page `source` holds, because they will continue differently.

    A fork's tail: its leader writes on to the page that its prompt ends in. A named prefix's tail:
    each request continues it on its own. A prompt's last page, cached whole: its last token is
    computed again, for its logits.
    """

    source: int
    target: int


class PageTables:
    """The page tables of one pool, and the other kinds of units.

    `pool`, `kinds`, `ends`, `cache`, `pins`, `capacity` and `disk` may be read by others.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        pool: PagePool,
        stats: SchedulerStats,
        disk: Disk | None = None,
        ends: Sequence[EndKind] = (),
    ) -> None:
        """Begin with empty tables.

        disk: second level of the cache, or None
        ends: kinds beside the full pages
        """
        assert config.max_model_len is not None, "known once the model is loaded"
        self.pool = pool
        self.ends = tuple(ends)
        others = [end.reclaimer for end in ends if end.reclaimer is not None]
        self._full = FullPages(pool, others)
        self.kinds: tuple[UnitKind, ...] = (self._full, *ends)
        # A tail ends in the middle of a page, where no other kind can go on.
        has_ends = bool(ends)
        self.cache = PrefixCache(
            pool,
            is_on=config.enable_prefix_caching,
            copies_tails=config.page_tail is PageTail.COPY and not has_ends,
            ends=self.ends,
        )
        self.pins = Pins(pool, config.max_pinned_fraction)
        self.disk = DiskPages(pool, disk, self.kinds, self.ends)
        self.capacity = Capacity(
            config.max_model_len, pool, self.pins, self.cache, may_recompute=has_ends
        )
        self.now = 0.0  # seconds, at the last `expire`
        self.num_unread = 0  # steps that were planned and not read
        self._stats = stats
        self._copies: dict[LiveRequest, PageCopy] = {}  # to make before the next launch
        self._ending: set[LiveRequest] = set()  # ended, but a step that uses their pages is unread
        self._duplicates: list[int] = []  # in no table, but an unread step uses them

    @property
    def num_free(self) -> int:
        """Number of pages by which tables could grow: each takes one of every kind."""
        num_free = self.pool.num_free
        for end in self.ends:
            num_free = min(num_free, end.room.num_free())
        return num_free

    def room(self, request: LiveRequest) -> int:
        """Return how many more tokens the request's pages and all free pages could take."""
        num_pages = len(request.page_table) + self.pool.num_free
        for end in self.ends:
            num_pages = min(num_pages, end.room.max_pages(request))
        return num_pages * self.pool.page_size - request.num_computed

    # ---- tables begin and grow

    def start(
        self,
        request: LiveRequest,
        cached: Sequence[int],
        tail: Tail | None,
        reading: Reading | None = None,
    ) -> None:
        """Begin a table with the `cached` pages, whose tokens count as computed.

        tail: page whose first tokens are to be copied after the cached ones
        reading: what is to be read, if anything
        """
        reach = len(cached) if reading is None else reading.reach
        # Before anything is allocated, which could evict them.
        self.pool.retain(cached)
        self.pool.retain([tail.page] if tail else [])
        if self.ends:
            num_known, is_cached = self.cache.num_known(request), self.cache.serves(request)
            start = Start(reach, reading is not None, num_known, is_cached)
            for end in self.ends:
                end.begin(request, start)
        self.cache.forget(request)
        request.page_table = as_page_table(cached)
        num_copied = tail.num_tokens if tail else 0
        request.num_computed = len(cached) * self.pool.page_size + num_copied
        request.disk_first = len(cached)
        request.disk_base, request.disk_end, request.disk_resume = len(cached), 0, 0
        if reading is not None:
            request.disk_base, request.disk_end = reading.base, reach

    def copy_tail(self, request: LiveRequest, tail: Tail) -> None:
        """Copy the tail that the request was started with to the page after the cached ones."""
        target = request.page_table[request.num_computed // self.pool.page_size]
        self._copies[request] = PageCopy(tail.page, target)

    def fork(self, fork: LiveRequest, leader: LiveRequest) -> int:
        """Begin a table with the leader's pages, and return the number of shared ones; a page must be free.

        Full pages are shared, and the page that the prompt ends in is copied. The last token is computed
        again.
        """
        assert not self.ends, "a fork goes on from the prompt's last page boundary instead"
        num_pages, num_in_tail = divmod(fork.num_prompt - 1, self.pool.page_size)
        shared = leader.page_table[:num_pages]
        self.pool.share(shared)
        fork.page_hashes[:] = leader.page_hashes[: fork.num_prompt // self.pool.page_size]
        fork.page_table = shared
        fork.num_computed = fork.num_prompt - 1
        if num_in_tail:
            pages = self.pool.allocate(1)
            assert pages is not None, "there was a free page"
            fork.page_table = shared + as_page_table(pages)
            source = leader.page_table[num_pages]
            self.pool.share([source])
            self._copies[fork] = PageCopy(source, pages[0])
        return num_pages

    def grow(self, request: LiveRequest, end: int) -> bool:
        """Make the table cover `end` tokens. False without any change for lack of pages."""
        table, num_pages = request.page_table, -(-end // self.pool.page_size)
        missing = num_pages - len(table)
        if missing <= 0:
            return True
        for kind in self.ends:
            if not kind.room.can_grow(request, num_pages):
                return False
        if self.ends and missing > self.pool.blank.opened.count:
            self._full.reclaimer.make_room(missing)
        pages = self.pool.allocate(missing, table[-1] if table else None)
        if pages is None:
            return False
        request.page_table = table + as_page_table(pages)
        for kind in self.ends:
            kind.grow(request, num_pages)
        return True

    # ---- publishing

    def publish(self, request: LiveRequest, first: int, end: int, *, has_ends: bool = True) -> None:
        """Make pages first .. end of the table findable, which must be computed.

        If another request published the same content first, hold its page instead.

        has_ends: publish the units of the other kinds as well
        """
        if first >= end or not self.cache.serves(request):
            return
        self.cache.hash(request)
        page_size, before = self.pool.page_size, self.cache.parent(request, first)
        parent, duplicates = before, []
        for index in range(first, end):
            hash_, page = request.page_hashes[index], request.page_table[index]
            tokens = request.token_ids[index * page_size : (index + 1) * page_size]
            if not self.pool.publish(page, hash_, parent, tokens):
                duplicates.append(index)
            parent = hash_
        if duplicates:
            self._rebind(request, duplicates)
        for kind in self.ends if has_ends else ():
            kind.publish(request, first, end, before)

    def _rebind(self, request: LiveRequest, duplicates: Sequence[int]) -> None:
        """Replace the request's own pages at these indices by those with the same content.

        An unread step may use its own pages, so they are released when that step has been read.
        """
        self._stats.rebound_pages += len(duplicates)
        table = request.page_table[:]
        for index in duplicates:
            self._duplicates.append(table[index])
            table[index] = self.pool.adopt(request.page_hashes[index])
        request.page_table = table

    # ---- tables end

    def release(self, request: LiveRequest) -> None:
        """Release the request's pages, now or when the last step that uses them is read."""
        for end in self.ends:
            end.stop(request)
        request.loading, request.disk_end, request.disk_resume = None, 0, 0
        if request.num_in_flight:
            self._ending.add(request)
            return
        self._ending.discard(request)
        request.decodes_until = request.commits_until = 0
        if (copy := self._copies.pop(request, None)) is not None:
            self.pool.release([copy.source])
        self.disk.use(request)
        self.pool.order.clock += 1
        self.pool.release(request.page_table)
        request.page_table = as_page_table()
        for end in self.ends:
            end.release(request)

    def step_read(self) -> None:
        """Count the oldest unread step as read: no other one uses the duplicates so far."""
        assert self.num_unread > 0, "no step is unread"
        self.num_unread -= 1
        if self._duplicates:
            self._release_duplicates()

    def release_unused(self) -> None:
        """Free the duplicates at once, unless an unread step may use them."""
        if self._duplicates and not self.num_unread:
            self._release_duplicates()

    def _release_duplicates(self) -> None:
        self.pool.release(self._duplicates)
        self._duplicates.clear()

    def end(self, request: LiveRequest) -> None:
        """Release everything that an ended request holds or was promised."""
        self.cache.forget(request)
        self.pins.cancel(request)
        self.release(request)

    # ---- copies

    def pop_copies(self) -> list[PageCopy]:
        """Return the copies to make now. A step that is launched after them may write to their sources."""
        copies = list(self._copies.values())
        if copies:
            self._copies.clear()
            self._stats.tail_copies += len(copies)
            self.pool.release([copy.source for copy in copies])
        return copies

    # ---- the disk

    def reading(self, request: LiveRequest, base: int) -> Reading | None:
        """Return what to read from disk, as far as that is faster than computing; None if nothing is.

        base: pages that the request can continue after without reading; `PrefixCache.match` has just found them
        """
        if not self.cache.serves(request):
            return None
        end = (len(request.token_ids) - 1) // self.pool.page_size  # as `PrefixCache.matchable`
        num_known = self.cache.num_known(request)
        num_whole = partial(self.cache.num_whole, request) if request.asked.blocks else None
        reach = self.disk.reach(request.page_hashes, base, num_known, end, num_whole)
        return Reading(base, reach) if reach > base else None

    def save(self, request: LiveRequest, number: int | None = None) -> Save | None:
        """Plan to write the pages that only this request holds to disk, before it releases them.

        number: that of the preemption, if it is to be logged once the disk has answered
        """
        if not self.cache.serves(request):
            return None
        self.cache.hash(request)
        return self.disk.save(request, number)

    def load(self, request: LiveRequest) -> None:
        """Plan to read the request's next pages on disk, as far as there are free pages."""
        first = request.num_computed // self.pool.page_size
        room = len(request.page_table) - first + self.pool.num_free
        end = min(request.disk_end, first + min(LOAD_PAGES, room))
        grown = self.grow(request, end * self.pool.page_size)
        assert grown, "there was room for them"
        self.disk.load(request, end)

    def finish_load(
        self, request: LiveRequest, load: Load, num_pages: int, *, has_ends: bool = False
    ) -> None:
        """Commit the first `num_pages` pages of a load; the others are lost.

        has_ends: the units that other kinds need to continue after them were read, too
        """
        assert request.loading is load.run, f"{request.id} does not wait for these pages"
        request.loading = None
        first = load.run.first
        self.publish(request, first, first + num_pages, has_ends=False)
        num_tokens = num_pages * self.pool.page_size
        request.num_computed += num_tokens
        is_lost = num_pages < len(load.run.hashes) or load.is_last != has_ends
        if self.ends:
            if is_lost:
                self._begin_again(request)
            elif not has_ends:
                return  # more pages are to come
            else:
                for end, units in zip(self.ends, load.ends, strict=True):
                    end.loaded(request, units, partial(self.cache.parent, request))
            num_pages = 0 if is_lost else load.run.end - request.disk_first
            num_tokens = num_pages * self.pool.page_size
        self._stats.restored_tokens += num_tokens
        if not request.has_resumed:
            num_found = 0 if is_lost else request.disk_first - request.disk_base
            self._count_read(request, num_found, num_pages, is_lost=is_lost)
        if is_lost:
            last = request.disk_end
            self.disk.skip_lost(request)
            num_again = min((request.disk_resume or last) * self.pool.page_size, request.num_lost)
            self._stats.recomputed_tokens += max(0, num_again - request.num_computed)

    def _begin_again(self, request: LiveRequest) -> None:
        """Release the pages that were read, back to one in memory that every kind can continue after."""
        num_pages = self.cache.usable(request, request.disk_base)
        for end in self.ends:
            end.begin_again(request, num_pages)
        table = request.page_table
        self.pool.release(table[num_pages:])
        request.page_table = table[:num_pages]
        request.num_computed = num_pages * self.pool.page_size

    def _count_read(
        self, request: LiveRequest, num_found: int, num_read: int, *, is_lost: bool
    ) -> None:
        """Count pages of a prompt that were read as cache hits.

        num_found: pages that were in memory, but of no use without what was read
        """
        assert request.cache is not None, "reported when it was admitted"
        num_tokens = (num_found + num_read) * self.pool.page_size
        request.num_cached += num_tokens
        self._stats.prefix_hits += num_tokens
        num_from_store, request.num_from_store = min(request.num_from_store, num_read), 0
        request.cache = self.cache.with_read(
            request.cache, num_found, num_read, num_from_store=num_from_store, is_lost=is_lost
        )

    # ---- protection from eviction

    def promise_pins(self, request: LiveRequest) -> None:
        """Reserve the pages of a named prefix. Raises PrefixQuotaExceeded."""
        self.pins.reserve(request, self.cache.chain(request))

    def pin(self, request: LiveRequest) -> None:
        """Pin the pages of a named prefix that was computed; make its tail findable."""
        chain, num_full = self.cache.chain(request), request.num_prompt // self.pool.page_size
        if len(chain) > num_full:
            parent, tokens = self.cache.end_of_prompt(request)
            self.pool.publish(request.page_table[num_full], chain[-1], parent, tokens)
        self.pool.pin(self.pins.fulfil(request))
        for end in self.ends:
            end.pin(request)

    def unpin(self, request_id: str) -> None:
        """Unpin the pages of a named prefix; no-op if there are none."""
        self.pool.unpin(self.pins.drop(request_id))
        for end in self.ends:
            end.unpin(request_id)

    def keep_pages(self, hashes: Sequence[bytes], until: float) -> None:
        """Protect the cached pages of a prefix with these hashes until a time in seconds."""
        known = list(takewhile(self.pool.index.is_known, hashes))
        self.pool.order.keep_until([self.pool.index.page_of(hash_) for hash_ in known], until)
        for end in self.ends:
            end.keep(known, until)

    def expire(self, now: float) -> None:
        """Set the time to `now`, in seconds, and end the protections that have expired."""
        self.now = now
        self.pool.order.expire(now)
        for end in self.ends:
            end.expire(now)

    # ---- the whole pool

    def reset(self) -> bool:
        """Reset the pool as `PagePool.reset` does, and the other kinds with it."""
        is_done = self.pool.reset()
        if is_done:
            for end in self.ends:
                end.reset()
        return is_done

    def forget(self, hashes: Iterable[bytes]) -> set[bytes]:
        """Evict these pages and all after them, and the units of the other kinds there.

        Pages that a request holds, or a named prefix has, stay. Returns the hashes that may be deleted from
        disk as well.
        """
        unpinned = {hash_ for hash_ in hashes if not self.pins.has(hash_)}
        gone = unpinned.union(self.pool.forget(unpinned))
        for end in self.ends:
            end.forget(gone)
        return {hash_ for hash_ in gone if not self.pool.index.is_known(hash_)}

    def grow_pool(self, num_pages: int) -> None:
        """Grow the pool to `num_pages` pages."""
        self.pool.grow(num_pages)

    def check(self, running: Sequence[LiveRequest]) -> None:
        """Audit the tables and the pool. Raises AssertionError."""
        holders = [*running, *self._ending]
        tables = [request.page_table for request in holders]
        sources = [copy.source for copy in self._copies.values()]
        self.pool.check([*tables, sources, self._duplicates])
        self.cache.check()
        for end in self.ends:
            end.check(running, holders)
        for request, copy in self._copies.items():
            assert copy.target in request.page_table, f"{request.id} has lost its copy"
        check_running(running, self.pool, self.num_unread)
        check_ending(self._ending, self.pool, self.num_unread)
        for request in running:
            check_foresight(request, self.pool.page_size, self.capacity.max_length(request) - 1)

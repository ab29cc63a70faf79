"""PrefixCache: the cached pages that a request finds by its hashes, and the reason why it finds no more.

Reads the pool, and decides nothing. The report discloses nothing of other clients' prompts: pages are
compared within one salt only, and another salt is given as the reason only where the same client used
it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple
from weakref import WeakKeyDictionary

from mlxserve.cache.hashing import extend_hashes, page_hash, root
from mlxserve.cache.kinds.kind import EndKind, num_usable
from mlxserve.cache.pages import PagePool
from mlxserve.images.picture import begin_of_block, marks_of, num_distinct, pictures_of
from mlxserve.request import ANONYMOUS, CacheMiss, CacheReport, LiveRequest, Request

MAX_REMEMBERED = 4096  # first pages whose last salt is remembered


class Tail(NamedTuple):
    """A page whose first `num_tokens` tokens continue a prompt, which then differs."""

    page: int
    num_tokens: int


class _Match:
    """The pages that a waiting request found, valid until one of them is evicted."""

    __slots__ = ("_known", "num_evicted", "pages")

    def __init__(self, num_evicted: int) -> None:
        self.num_evicted = num_evicted  # the pool's count when all these pages were cached
        self.pages: list[int] = []
        self._known: set[int] = set()

    def add(self, pages: Sequence[int]) -> None:
        self.pages += pages
        self._known.update(pages)

    def has_lost(self, evicted: Sequence[int]) -> bool:
        return not self._known.isdisjoint(evicted)

    def cut(self, count: int) -> None:
        """Keep only the first `count` pages."""
        if count < len(self.pages):
            self.pages = self.pages[:count]
            self._known = set(self.pages)


class PrefixCache:
    """The prefix cache of one pool; finds nothing if it is off, and tails only if they are copied."""

    def __init__(
        self,
        pool: PagePool,
        *,
        is_on: bool,
        copies_tails: bool,
        ends: Sequence[EndKind] = (),
    ) -> None:
        """Take the pool, and the `ends` that limit how much of a cached prefix is usable."""
        self.is_on = is_on
        self._ends = ends
        self._copies_tails = is_on and copies_tails
        self._pool = pool
        self._explainer = Explainer(pool)
        self._matches: dict[LiveRequest, _Match] = {}
        # Page hashes of requests, live or ended, for as long as their callers hold them.
        self._hashes: WeakKeyDictionary[Request, list[bytes]] = WeakKeyDictionary()

    def serves(self, request: LiveRequest) -> bool:
        """Return True if the request reads and extends the cache."""
        return self.is_on and not request.asked.skips_cache

    # ---- hashes

    def hash(self, request: LiveRequest, num_pages: int | None = None) -> None:
        """Extend the request's page hashes to all its full pages, or to the first `num_pages`."""
        token_ids, page_size = request.token_ids, self._pool.page_size
        if num_pages is not None:
            token_ids = token_ids[: num_pages * page_size]
        asked = request.asked
        marks = marks_of(asked.pictures) if asked.pictures else ()
        extend_hashes(request.page_hashes, token_ids, page_size, asked.cache_salt, marks)

    def share_hashes(self, request: LiveRequest) -> None:
        """Reuse the prompt's hashes of an earlier lookup, and keep the request's own for later ones."""
        known = self.known_hashes(request.asked)[: request.num_prompt // self._pool.page_size]
        if len(known) > len(request.page_hashes):
            request.page_hashes[:] = known
        self._hashes[request.asked] = request.page_hashes

    def known_hashes(self, asked: Request) -> Sequence[bytes]:
        """Return the hashes of a request's pages, including its answer's; empty after a restart."""
        return self._hashes.get(asked, ())

    def hashes_of(self, prompt: Sequence[int], salt: bytes) -> list[bytes]:
        """Return the hashes of a prompt's full pages, without a request."""
        hashes: list[bytes] = []
        marks = marks_of(pictures_of(prompt))
        extend_hashes(hashes, prompt, self._pool.page_size, salt, marks)
        return hashes

    def parent(self, request: LiveRequest, index: int) -> bytes:
        """Return the hash of the page before page `index`."""
        return request.page_hashes[index - 1] if index else root(request.asked.cache_salt)

    def chain(self, request: LiveRequest) -> tuple[bytes, ...]:
        """Return the hashes of the pages that a named prefix pins: full pages, and its tail if copied."""
        self.hash(request)
        full, tail = divmod(request.num_prompt, self._pool.page_size)
        pages = tuple(request.page_hashes[:full])
        if not tail or not self._copies_tails:
            return pages
        return (*pages, page_hash(*self.end_of_prompt(request)))

    def end_of_prompt(self, request: LiveRequest) -> tuple[bytes, Sequence[int]]:
        """Return the page that the prompt ends in: the hash of the page before it, and its tokens."""
        full = request.num_prompt // self._pool.page_size
        tokens = request.token_ids[full * self._pool.page_size : request.num_prompt]
        return self.parent(request, full), tokens

    # ---- lookups

    def matchable(self, request: LiveRequest, first: int = 0) -> list[bytes]:
        """Return the hashes of the request's pages from `first` on that may come from the cache.

        The page of its last token is left out, because that token is always computed.
        """
        return request.page_hashes[first : (len(request.token_ids) - 1) // self._pool.page_size]

    def match(self, request: LiveRequest) -> list[int]:
        """Return the cached pages of a request's known tokens.

        The match is remembered while the request waits: it only grows until one of its pages is evicted.
        """
        if not self.serves(request):
            return []
        self.hash(request)
        match = self._matches.get(request)
        if match is None:
            match = self._matches[request] = _Match(self._pool.evictions.count)
        evicted = self._pool.evictions.since(match.num_evicted)
        if evicted is None or match.has_lost(evicted):
            match.cut(self._pool.index.num_unchanged(match.pages, request.page_hashes))
        match.num_evicted = self._pool.evictions.count
        skip = len(match.pages)
        if skip < len(request.page_hashes) and self._pool.index.is_known(request.page_hashes[skip]):
            match.add(self._pool.index.match(self.matchable(request), request.token_ids, skip=skip))
        if request.asked.blocks:
            return match.pages[: self.usable(request, len(match.pages))]
        if not self._ends:
            return match.pages
        return match.pages[: num_usable(self._ends, request.page_hashes, len(match.pages))]

    def usable(self, request: LiveRequest, num_pages: int) -> int:
        """Return after how many of the first `num_pages` cached pages the request can continue.

        Every kind must be able to, and an image that one chunk computes is not divided.
        """
        while True:
            num_pages = num_usable(self._ends, request.page_hashes, num_pages)
            num_whole = self.num_whole(request, num_pages)
            if num_whole == num_pages:
                return num_pages
            num_pages = num_whole

    def num_whole(self, request: LiveRequest, num_pages: int) -> int:
        """Return how many of the first `num_pages` pages end inside no image that one chunk computes."""
        page_size, blocks = self._pool.page_size, request.asked.blocks
        while (whole := begin_of_block(blocks, num_pages * page_size) // page_size) < num_pages:
            num_pages = whole
        return num_pages

    def known(self, request: LiveRequest) -> list[int]:
        """Return the pages of the last match, whether or not all kinds can continue after them."""
        match = self._matches.get(request)
        return match.pages if match is not None else []

    def num_known(self, request: LiveRequest) -> int:
        return len(self.known(request))

    def tail(self, request: LiveRequest, cached: Sequence[int]) -> Tail | None:
        """Return the page to copy after the `cached` ones; valid as long as they are.

        It is the last page of a prompt that is cached whole, or the end of a named prefix.
        """
        if not self._copies_tails or not self.serves(request):
            return None
        page_size, hashes, token_ids = self._pool.page_size, request.page_hashes, request.token_ids
        start, last = len(cached) * page_size, len(token_ids) - 1
        if start + page_size == len(token_ids) and (
            whole := self._pool.index.match(hashes, token_ids, skip=len(cached))
        ):
            num_tokens = page_size - 1
            if request.asked.blocks:
                num_tokens = begin_of_block(request.asked.blocks, start + num_tokens) - start
            return Tail(whole[0], num_tokens) if num_tokens > 0 else None
        parent = self.parent(request, len(cached))
        found = self._pool.index.find_tail(parent, token_ids[start : min(last, start + page_size)])
        if found is None:
            return None
        page, num_tokens = found
        num_tokens = num_distinct(request.asked.pictures, start, num_tokens)
        if request.asked.blocks:
            num_tokens = begin_of_block(request.asked.blocks, start + num_tokens) - start
        return Tail(page, num_tokens) if num_tokens > 0 else None

    def forget(self, request: LiveRequest) -> None:
        """Drop the match of a request that no longer waits; no-op if there is none."""
        self._matches.pop(request, None)

    def check(self) -> None:
        """Audit the invariants. Raises AssertionError."""
        for request, match in self._matches.items():
            assert all(page < self._pool.num_pages for page in match.pages), (
                f"the match of {request.id} names a page that is gone"
            )

    # ---- reports

    def report(
        self,
        request: LiveRequest,
        num_pages: int,
        num_copied: int,
        num_known: int,
        num_to_read: int,
    ) -> CacheReport:
        """Return the report of a prompt, of which `num_pages` were found.

        num_copied: tokens that it copies of the next page
        num_known: pages that are cached, whether or not all kinds can continue after them
        num_to_read: pages after the found ones that it has once others are read; `with_read` adds them
        """
        if not self.serves(request):
            return CacheReport(0, 0, 0, CacheMiss.OFF, page_size=self._pool.page_size)
        found = self._explainer.report(request, self.matchable(request), num_pages + num_to_read)
        if num_to_read:
            return replace(found, num_pages=num_pages, num_tokens=num_pages * self._pool.page_size)
        if num_known > num_pages:
            missing = self._missing(request, num_known)
            num_tokens = found.num_tokens + num_copied
            return replace(found, num_tokens=num_tokens, differs_at=num_tokens, reason=missing)
        num_tokens = found.num_tokens + num_copied
        differs_at = max(found.differs_at, num_tokens)
        return replace(found, num_tokens=num_tokens, differs_at=differs_at)

    def _missing(self, request: LiveRequest, num_known: int) -> CacheMiss:
        """Return the reason why a prompt cannot continue after `num_known` cached pages."""
        hashes = request.page_hashes
        lacking = (e for e in self._ends if e.num_usable(hashes, num_known) < num_known)
        end = next(lacking, None)
        return CacheMiss.INSIDE_IMAGE if end is None else end.missing

    def with_read(
        self,
        report: CacheReport,
        num_found: int,
        num_read: int,
        *,
        num_from_store: int = 0,
        is_lost: bool,
    ) -> CacheReport:
        """Return the report with more pages: those found in memory, and those read from disk or store.

        num_from_store: pages of the latter that came from a page store
        is_lost: the next page could not be read
        """
        num_pages, page_size = num_found + num_read, self._pool.page_size
        found = replace(
            report,
            num_pages=report.num_pages + num_pages,
            num_tokens=report.num_tokens + num_pages * page_size,
            num_from_disk=report.num_from_disk + (num_read - num_from_store) * page_size,
            num_from_store=report.num_from_store + num_from_store * page_size,
        )
        if is_lost or report.reason is CacheMiss.LOST:  # pages after a lost one are read as well
            return replace(found, differs_at=found.num_tokens, reason=CacheMiss.LOST)
        return found

    def report_fork(self, fork: LiveRequest, num_pages: int) -> CacheReport:
        """Return the report of a fork, which shares `num_pages` full pages with its leader."""
        if not self.serves(fork):
            return CacheReport(0, 0, 0, CacheMiss.OFF, page_size=self._pool.page_size)
        size = self._pool.page_size
        num_tokens = num_pages * size
        reason = CacheMiss.BELOW_ONE_PAGE
        return CacheReport(num_pages, num_tokens, num_tokens, reason, page_size=size)


class Explainer:
    """Finds the reason of a cache miss; remembers the salt of each client's last prompts."""

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._salts: OrderedDict[tuple[str, bytes], bytes] = OrderedDict()

    def report(
        self, request: LiveRequest, matchable: Sequence[bytes], num_pages: int
    ) -> CacheReport:
        """Return the report of a prompt that found the first `num_pages` of its `matchable` pages."""
        known_salt = self._remember(request)
        size = self._pool.page_size
        num_tokens = num_pages * size
        if num_pages == len(matchable):
            reason = CacheMiss.BELOW_ONE_PAGE
            return CacheReport(num_pages, num_tokens, num_tokens, reason, page_size=size)
        if self._pool.evictions.has(matchable[num_pages]):
            reason = CacheMiss.EVICTED
            return CacheReport(num_pages, num_tokens, num_tokens, reason, page_size=size)
        if num_pages == 0 and known_salt not in (None, request.asked.cache_salt):
            return CacheReport(0, 0, 0, CacheMiss.OTHER_SALT, page_size=size)
        parent = matchable[num_pages - 1] if num_pages else root(request.asked.cache_salt)
        page = request.token_ids[num_tokens : num_tokens + size]
        differs_at = num_tokens + self._pool.index.num_common(parent, page)
        return CacheReport(num_pages, num_tokens, differs_at, CacheMiss.NEW_TEXT, page_size=size)

    def _remember(self, request: LiveRequest) -> bytes | None:
        """Record the prompt's salt; return that of the client's last prompt with the same first page."""
        if len(request.token_ids) < self._pool.page_size:
            return None
        client = "" if request.asked.client.startswith(ANONYMOUS) else request.asked.client
        key = client, page_hash(b"", request.token_ids[: self._pool.page_size])
        known = self._salts.pop(key, None)
        self._salts[key] = request.asked.cache_salt
        if len(self._salts) > MAX_REMEMBERED:
            self._salts.popitem(last=False)
        return known

"""PrefixCache: what a request finds in the pool by the hashes of its pages, and why no more.

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
from mlxserve.images.picture import marks_of, num_distinct, pictures_of
from mlxserve.request import ANONYMOUS, CacheMiss, CacheReport, LiveRequest, Request

MAX_REMEMBERED = 4096  # first pages whose salt is known


class Tail(NamedTuple):
    """A page whose first tokens are the next of a prompt, which continues differently after them."""

    page: int
    num_tokens: int


class _Match:
    """What was found for a waiting request, as long as none of it is evicted."""

    __slots__ = ("_known", "num_evicted", "pages")

    def __init__(self, num_evicted: int) -> None:
        self.num_evicted = num_evicted  # of the pool, when these pages were all there
        self.pages: list[int] = []
        self._known: set[int] = set()

    def add(self, pages: Sequence[int]) -> None:
        self.pages += pages
        self._known.update(pages)

    def has_lost(self, evicted: Sequence[int]) -> bool:
        return not self._known.isdisjoint(evicted)

    def cut(self, count: int) -> None:
        """Only the first `count` pages still hold what was found."""
        if count < len(self.pages):
            self.pages = self.pages[:count]
            self._known = set(self.pages)


class PrefixCache:
    """Finds nothing where it is off, and tails only where they are copied."""

    def __init__(
        self,
        pool: PagePool,
        *,
        is_on: bool,
        copies_tails: bool,
        ends: Sequence[EndKind] = (),
    ) -> None:
        """ends: kinds that limit how much of what is found can be used"""
        self.is_on = is_on
        self._ends = ends
        self._copies_tails = is_on and copies_tails
        self._pool = pool
        self._explainer = Explainer(pool)
        self._matches: dict[LiveRequest, _Match] = {}
        # Of requests that were looked up, live or ended, as long as their callers hold them.
        self._hashes: WeakKeyDictionary[Request, list[bytes]] = WeakKeyDictionary()

    def serves(self, request: LiveRequest) -> bool:
        """Whether the request finds pages here, and leaves its own."""
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
        """Take the hashes of the prompt's pages from an earlier lookup, and keep the request's own for later ones."""
        known = self.known_hashes(request.asked)[: request.num_prompt // self._pool.page_size]
        if len(known) > len(request.page_hashes):
            request.page_hashes[:] = known
        self._hashes[request.asked] = request.page_hashes

    def known_hashes(self, asked: Request) -> Sequence[bytes]:
        """Of its pages, those of its answer included; empty after a restart."""
        return self._hashes.get(asked, ())

    def hashes_of(self, prompt: Sequence[int], salt: bytes) -> list[bytes]:
        """Of the full pages of a prompt that no request asks for."""
        hashes: list[bytes] = []
        marks = marks_of(pictures_of(prompt))
        extend_hashes(hashes, prompt, self._pool.page_size, salt, marks)
        return hashes

    def parent(self, request: LiveRequest, index: int) -> bytes:
        """The hash before page `index` in its chain."""
        return request.page_hashes[index - 1] if index else root(request.asked.cache_salt)

    def chain(self, request: LiveRequest) -> tuple[bytes, ...]:
        """Hashes of the pages that a named prefix pins: the full ones, and its tail if it is to be
        copied."""
        self.hash(request)
        full, tail = divmod(request.num_prompt, self._pool.page_size)
        pages = tuple(request.page_hashes[:full])
        if not tail or not self._copies_tails:
            return pages
        return (*pages, page_hash(*self.end_of_prompt(request)))

    def end_of_prompt(self, request: LiveRequest) -> tuple[bytes, Sequence[int]]:
        """The page that the prompt ends in: the hash before it, and its tokens."""
        full = request.num_prompt // self._pool.page_size
        tokens = request.token_ids[full * self._pool.page_size : request.num_prompt]
        return self.parent(request, full), tokens

    # ---- what is found

    def matchable(self, request: LiveRequest, first: int = 0) -> list[bytes]:
        """Hashes of its pages from `first` on, without the last token's: that one is always
        computed."""
        return request.page_hashes[first : (len(request.token_ids) - 1) // self._pool.page_size]

    def match(self, request: LiveRequest) -> list[int]:
        """Cached pages of its known tokens.

        Remembered while it waits: as long as none of them is evicted, a match can only grow.
        """
        if not self.serves(request):
            return []
        self.hash(request)
        found = self._matches.get(request)
        if found is None:
            found = self._matches[request] = _Match(self._pool.evictions.count)
        evicted = self._pool.evictions.since(found.num_evicted)
        if evicted is None or found.has_lost(evicted):
            found.cut(self._pool.index.num_unchanged(found.pages, request.page_hashes))
        found.num_evicted = self._pool.evictions.count
        skip = len(found.pages)
        if skip < len(request.page_hashes) and self._pool.index.is_known(request.page_hashes[skip]):
            found.add(self._pool.index.match(self.matchable(request), request.token_ids, skip=skip))
        if not self._ends:
            return found.pages
        return found.pages[: num_usable(self._ends, request.page_hashes, len(found.pages))]

    def num_known(self, request: LiveRequest) -> int:
        """Cached pages of a request that was matched, whether or not all kinds can go on after them."""
        found = self._matches.get(request)
        return len(found.pages) if found is not None else 0

    def tail(self, request: LiveRequest, cached: Sequence[int]) -> Tail | None:
        """What could be copied after the `cached` pages that it matches. Holds as long as they do.

        The last page of a prompt that is cached whole, or the end of a named prefix.
        """
        if not self._copies_tails or not self.serves(request):
            return None
        page_size, hashes, token_ids = self._pool.page_size, request.page_hashes, request.token_ids
        start, last = len(cached) * page_size, len(token_ids) - 1
        if start + page_size == len(token_ids) and (
            whole := self._pool.index.match(hashes, token_ids, skip=len(cached))
        ):
            return Tail(whole[0], page_size - 1)
        parent = self.parent(request, len(cached))
        found = self._pool.index.find_tail(parent, token_ids[start : min(last, start + page_size)])
        if found is None:
            return None
        page, num_tokens = found
        num_tokens = num_distinct(request.asked.pictures, start, num_tokens)
        return Tail(page, num_tokens) if num_tokens else None

    def forget(self, request: LiveRequest) -> None:
        """Drop the match of a request that does not wait any more; no-op if there is none."""
        self._matches.pop(request, None)

    def check(self) -> None:
        """Audit. Raises AssertionError."""
        for request, match in self._matches.items():
            assert all(page < self._pool.num_pages for page in match.pages), (
                f"the match of {request.id} names a page that is gone"
            )

    # ---- what is reported

    def report(
        self,
        request: LiveRequest,
        num_pages: int,
        num_copied: int,
        num_known: int,
        num_on_disk: int,
    ) -> CacheReport:
        """Of a prompt of which `num_pages` were found, and `num_copied` tokens of the next page.

        num_known: pages that are cached, whether or not all kinds can go on after them
        num_on_disk: pages after those found that are being read, and are added by `with_read`
        """
        if not self.serves(request):
            return CacheReport(0, 0, 0, CacheMiss.OFF)
        found = self._explainer.report(request, self.matchable(request), num_pages + num_on_disk)
        if num_on_disk:
            return replace(found, num_pages=num_pages, num_tokens=num_pages * self._pool.page_size)
        if num_known > num_pages:
            missing = self._missing(request, num_known)
            return replace(found, differs_at=found.num_tokens, reason=missing)
        num_tokens = found.num_tokens + num_copied
        differs_at = max(found.differs_at, num_tokens)
        return replace(found, num_tokens=num_tokens, differs_at=differs_at)

    def _missing(self, request: LiveRequest, num_known: int) -> CacheMiss:
        """The reason why a prompt cannot go on after `num_known` cached pages."""
        hashes = request.page_hashes
        lacking = (e for e in self._ends if e.num_usable(hashes, num_known) < num_known)
        return next(lacking).missing

    def with_read(self, report: CacheReport, num_pages: int, *, is_lost: bool) -> CacheReport:
        """The report of a prompt of which `num_pages` more were read from disk.

        `is_lost`: the next one could not be read.
        """
        num_tokens = num_pages * self._pool.page_size
        found = replace(
            report,
            num_pages=report.num_pages + num_pages,
            num_tokens=report.num_tokens + num_tokens,
            num_from_disk=report.num_from_disk + num_tokens,
        )
        if is_lost or report.reason is CacheMiss.LOST:  # pages after a lost one are read as well
            return replace(found, differs_at=found.num_tokens, reason=CacheMiss.LOST)
        return found

    def report_fork(self, fork: LiveRequest, num_pages: int) -> CacheReport:
        """Of a prompt that shares its full pages with the request it is a fork of."""
        if not self.serves(fork):
            return CacheReport(0, 0, 0, CacheMiss.OFF)
        num_tokens = num_pages * self._pool.page_size
        return CacheReport(num_pages, num_tokens, num_tokens, CacheMiss.BELOW_ONE_PAGE)


class Explainer:
    """Remembers the salt of each client's last prompt, by its first page."""

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._salts: OrderedDict[tuple[str, bytes], bytes] = OrderedDict()

    def report(
        self, request: LiveRequest, matchable: Sequence[bytes], num_pages: int
    ) -> CacheReport:
        """The report of a prompt of which the first `num_pages` of `matchable` pages were found."""
        known_salt = self._remember(request)
        num_tokens = num_pages * self._pool.page_size
        if num_pages == len(matchable):
            return CacheReport(num_pages, num_tokens, num_tokens, CacheMiss.BELOW_ONE_PAGE)
        if self._pool.evictions.has(matchable[num_pages]):
            return CacheReport(num_pages, num_tokens, num_tokens, CacheMiss.EVICTED)
        if num_pages == 0 and known_salt not in (None, request.asked.cache_salt):
            return CacheReport(0, 0, 0, CacheMiss.OTHER_SALT)
        parent = matchable[num_pages - 1] if num_pages else root(request.asked.cache_salt)
        page = request.token_ids[num_tokens : num_tokens + self._pool.page_size]
        differs_at = num_tokens + self._pool.index.num_common(parent, page)
        return CacheReport(num_pages, num_tokens, differs_at, CacheMiss.NEW_TEXT)

    def _remember(self, request: LiveRequest) -> bytes | None:
        """The salt of this client's last prompt with the same first page."""
        if len(request.token_ids) < self._pool.page_size:
            return None
        client = "" if request.asked.client.startswith(ANONYMOUS) else request.asked.client
        key = client, page_hash(b"", request.token_ids[: self._pool.page_size])
        known = self._salts.pop(key, None)
        self._salts[key] = request.asked.cache_salt
        if len(self._salts) > MAX_REMEMBERED:
            self._salts.popitem(last=False)
        return known

"""EventPool: a page pool that reports which full pages of text become findable, and which ones no longer are.

    publish ──▶ stored       a page, after all pages before it
    evict   ──▶ removed      of what was reported alone
    reset, restart, or more events than the listener takes ──▶ cleared

After `cleared` nothing counts as reported. What is still cached is reported again when it is continued or was
pinned, so that nobody has to walk over the whole pool within a step.

`UnitPool` is the same for pages of layers with a window: it reports hashes alone, as all else is known of the full
pages with the same hashes.

Without a listener the plain `PagePool` is used, which knows nothing of this.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple, Protocol

from mlxserve.cache.eviction import HOT_AFTER
from mlxserve.cache.kinds.kind import UnitEvents
from mlxserve.cache.pages import PagePool, renew


class Stored(NamedTuple):
    """A full page that is findable now.

    parent: hash of the page before it; None for a first page
    root: the parent hash of the first page, which names the salt (`hashing.root`)
    """

    hash: bytes
    parent: bytes | None
    root: bytes
    token_ids: array[int]


class PageEvents(Protocol):
    """Takes the events. Its methods return at once; False means that the event was not taken."""

    page_size: int

    def stored(self, page: Stored, /) -> bool: ...

    def removed(self, hash_: bytes, /) -> bool: ...

    def cleared(self) -> None:
        """Drop the events that are not published yet; this one is always taken."""

    def close(self) -> None:
        """End for good; called by the owner of the pool's engine."""


class EventPool(PagePool):
    """A PagePool whose full pages of text are reported to `events`."""

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        hot_after: int = HOT_AFTER,
        num_open: int | None = None,
        *,
        events: PageEvents,
    ) -> None:
        """Begin empty, which is reported as `cleared`."""
        super().__init__(num_pages, page_size, hot_after, num_open)
        self._events = events
        # Roots of the first pages, by their hashes.
        self._roots: dict[bytes, bytes] = {}
        # The root of each page that was reported, by its hash; None for one that cannot be.
        self._reported: dict[bytes, bytes | None] = {}
        events.cleared()

    def publish(self, page: int, hash_: bytes, parent: bytes, token_ids: Sequence[int]) -> bool:
        is_new = super().publish(page, hash_, parent, token_ids)
        if is_new and len(token_ids) == self.page_size:
            if not self.index.is_known(parent):
                self._roots[hash_] = parent
            self._report(page)
        return is_new

    def reset(self) -> bool:
        reported, self._reported = self._reported, {}
        if not super().reset():
            self._reported = reported
            return False
        self._events.cleared()
        for page in self._pin_counts:
            if self.index.is_full(page):
                self._report(page)
        return True

    def renewed(self, num_pages: int | None = None) -> PagePool:
        return renew(self, num_pages, partial(EventPool, events=self._events))

    def _evict(self, page: int) -> int:
        hash_ = self.index.hash_of(page)
        assert hash_ is not None, f"page {page} has no hash"
        self._roots.pop(hash_, None)
        if self._reported.pop(hash_, None) is not None and not self._events.removed(hash_):
            self._start_over()
        return super()._evict(page)

    def _report(self, page: int) -> None:
        """Report a full page, after those before it that were not."""
        index, reported = self.index, self._reported
        chain: list[tuple[int, bytes]] = []
        root: bytes | None = None
        last: int | None = page
        while last is not None and (hash_ := index.hash_of(last)) is not None:
            if hash_ in reported:
                root = reported[hash_]
                break
            chain.append((last, hash_))
            # A page that lost the one before it has no root: nobody could find it.
            root = self._roots.get(hash_)
            last = None if root is not None else index.find(index.parent_of(last))
        for each, hash_ in reversed(chain):
            token_ids = index.token_ids_of(each)
            if root is not None and min(token_ids) < 0:
                root = None  # of an image, whose ids nobody else knows
            reported[hash_] = root
            if root is not None:
                parent = None if hash_ in self._roots else index.parent_of(each)
                if not self._events.stored(Stored(hash_, parent, root, token_ids)):
                    self._start_over()
                    return

    def _start_over(self) -> None:
        """Begin again after more events than are taken."""
        self._reported.clear()
        self._events.cleared()


class UnitPool(PagePool):
    """A PagePool of one kind's units, of which the full ones are reported to `events` by their hashes."""

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        hot_after: int = HOT_AFTER,
        num_open: int | None = None,
        *,
        kind: str,
        events: UnitEvents,
    ) -> None:
        """Begin empty, which is reported as `units_cleared`."""
        super().__init__(num_pages, page_size, hot_after, num_open)
        self._kind = kind
        self._events = events
        events.units_cleared(kind)

    def publish(self, page: int, hash_: bytes, parent: bytes, token_ids: Sequence[int]) -> bool:
        is_new = super().publish(page, hash_, parent, token_ids)
        if is_new and len(token_ids) == self.page_size:
            self._events.unit_stored(self._kind, hash_)
        return is_new

    def renewed(self, num_pages: int | None = None) -> PagePool:
        return renew(self, num_pages, partial(UnitPool, kind=self._kind, events=self._events))

    def _evict(self, page: int) -> int:
        hash_ = self.index.hash_of(page)
        assert hash_ is not None, f"page {page} has no hash"
        self._events.unit_removed(self._kind, hash_)
        return super()._evict(page)

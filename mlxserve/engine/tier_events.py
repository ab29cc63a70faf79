"""TierEvents: KV events of pages in memory, and of the same pages on disk and in the page store.

    EventPool ── stored, removed, cleared ──▶ TierEvents ──▶ KvEvents    medium GPU
    Tier      ── records that came or went ──▶    │    └───▶ KvEvents    medium DISK or STORAGE

A record has a name and no tokens, but subscribers match tokens. So a page is told of in a tier only if this process
has had it in memory: its tokens are remembered when it is evicted, for at most MAX_REMEMBERED pages.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Protocol

from mlxserve.cache.events import PageEvents, Stored
from mlxserve.disk.tier import Tier

# Evicted pages whose tokens are remembered: 0.5 KB each with pages of 32 tokens.
MAX_REMEMBERED = 1 << 16


class Publisher(PageEvents, Protocol):
    """Takes events of any medium, as `KvEvents` does."""

    def stored(self, page: Stored, /, medium: str = ...) -> bool: ...

    def removed(self, hash_: bytes, /, medium: str = ...) -> bool: ...


class TierEvents:
    """The `PageEvents` of a pool whose pages are kept in tiers as well. All methods are for the engine's thread."""

    def __init__(
        self,
        publisher: Publisher,
        tiers: Mapping[str, Tier],
        max_remembered: int = MAX_REMEMBERED,
    ) -> None:
        """Follow the records of `tiers`, by the medium that subscribers know each as.

        max_remembered: evicted pages that are told of; the oldest one counts as removed when there are more
        """
        self.page_size = publisher.page_size
        self._publisher = publisher
        self._tiers = tiers
        self._max_remembered = max_remembered
        self._in_memory: dict[bytes, Stored] = {}
        self._evicted: dict[bytes, Stored] = {}  # the first one was evicted first
        self._told: dict[str, set[bytes]] = {medium: set() for medium in tiers}
        # A removal was not taken, so that all events must begin again.
        self._is_behind = False
        for medium, tier in tiers.items():
            tier.report_to(partial(self._follow, medium))

    def stored(self, page: Stored, /) -> bool:
        if self._is_behind or not self._publisher.stored(page):
            return False
        self._evicted.pop(page.hash, None)
        self._in_memory[page.hash] = page
        for medium, tier in self._tiers.items():
            if tier.is_written(page.hash):
                self._tell(medium, page)
        return True

    def removed(self, hash_: bytes, /) -> bool:
        if self._is_behind or not self._publisher.removed(hash_):
            return False
        self._evicted[hash_] = self._in_memory.pop(hash_)
        if len(self._evicted) > self._max_remembered:
            oldest = next(iter(self._evicted))
            del self._evicted[oldest]
            for medium in self._tiers:
                self._retract(medium, oldest)
        return not self._is_behind

    def cleared(self) -> None:
        self._in_memory.clear()
        self._evicted.clear()
        for told in self._told.values():
            told.clear()
        self._is_behind = False
        self._publisher.cleared()

    def close(self) -> None:
        self._publisher.close()

    def _follow(self, medium: str, changes: Mapping[bytes, bool]) -> None:
        """Tell of records of a tier that came (True) or went. Those of other kinds are no page's."""
        for name, is_there in changes.items():
            if not is_there:
                self._retract(medium, name)
            elif (page := self._in_memory.get(name) or self._evicted.get(name)) is not None:
                self._tell(medium, page)

    def _tell(self, medium: str, page: Stored) -> None:
        told = self._told[medium]
        # One that is not taken stays untold: nobody expects more than there is.
        if page.hash not in told and self._publisher.stored(page, medium=medium):
            told.add(page.hash)

    def _retract(self, medium: str, hash_: bytes) -> None:
        told = self._told[medium]
        if hash_ in told:
            told.remove(hash_)
            self._is_behind |= not self._publisher.removed(hash_, medium=medium)

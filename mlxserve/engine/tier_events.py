"""TierEvents: KV events of pages in memory, of the same pages on disk and in the page store, and of other kinds.

    EventPool ───── stored, removed, cleared ──▶ TierEvents ──▶ KvEvents    medium GPU
    UnitPool, StateEnds ── windows, states ────▶     │    └───▶ KvEvents    medium GPU, another group
    Tier ──── records that came or went ───────▶     │    └───▶ KvEvents    medium DISK or STORAGE

A record has a name and no tokens, and so has a window or a state, but subscribers match tokens. So a unit is told of
only if this process has had the full page with its hash in memory: a page's tokens are remembered when it is
evicted, for at most MAX_REMEMBERED pages.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Protocol

from mlxserve.cache.events import PageEvents, Stored
from mlxserve.cache.hashing import HASH_SIZE
from mlxserve.disk.tier import Tier
from mlxserve.engine.disk_cache import SUFFIXES
from mlxserve.engine.kv_events import MEDIUM, PAGES, BlockGroup

# Evicted pages whose tokens are remembered: 0.5 KB each with pages of 32 tokens.
MAX_REMEMBERED = 1 << 16


class Publisher(PageEvents, Protocol):
    """Takes events of any medium and group, as `KvEvents` does."""

    def stored(self, page: Stored, /, medium: str = ..., group: int = ...) -> bool: ...

    def removed(self, hash_: bytes, /, medium: str = ..., group: int = ...) -> bool: ...


class TierEvents:
    """The `PageEvents` of a pool whose pages are kept in tiers as well, and the `UnitEvents` of the other kinds.

    All methods are for the engine's thread.
    """

    def __init__(
        self,
        publisher: Publisher,
        tiers: Mapping[str, Tier],
        groups: Sequence[BlockGroup] = (PAGES,),
        max_remembered: int = MAX_REMEMBERED,
    ) -> None:
        """Follow the records of `tiers`, by the medium that subscribers know each as.

        groups: the model's, that of the full pages first
        max_remembered: evicted pages that are told of; the oldest one counts as removed when there are more
        """
        self.page_size = publisher.page_size
        self._publisher = publisher
        self._tiers = tiers
        self._max_remembered = max_remembered
        # Units are named as their records are: by the hash of the page, and a suffix of the kind.
        self._groups = {SUFFIXES[group.name]: number for number, group in enumerate(groups)}
        self._in_memory: dict[bytes, Stored] = {}
        self._evicted: dict[bytes, Stored] = {}  # the first one was evicted first
        self._units: set[bytes] = set()  # of other kinds, in memory
        # Names of what subscribers know of; full pages in memory are known to the pool.
        self._told: dict[str, set[bytes]] = {medium: set() for medium in (MEDIUM, *tiers)}
        # A removal was not taken, so that all events must begin again.
        self._is_behind = False
        for medium, tier in tiers.items():
            tier.report_to(partial(self._follow, medium))

    # ---- full pages

    def stored(self, page: Stored, /) -> bool:
        if self._is_behind or not self._publisher.stored(page):
            return False
        self._evicted.pop(page.hash, None)
        self._in_memory[page.hash] = page
        for name in self._names(page.hash):
            if name in self._units:
                self._tell(MEDIUM, name, page)
            for medium, tier in self._tiers.items():
                if tier.is_written(name):
                    self._tell(medium, name, page)
        return True

    def removed(self, hash_: bytes, /) -> bool:
        if self._is_behind or not self._publisher.removed(hash_):
            return False
        self._evicted[hash_] = self._in_memory.pop(hash_)
        if len(self._evicted) > self._max_remembered:
            oldest = next(iter(self._evicted))
            del self._evicted[oldest]
            for name in self._names(oldest):
                for medium in self._told:
                    self._retract(medium, name)
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

    # ---- units of other kinds

    def unit_stored(self, kind: str, hash_: bytes, /) -> None:
        name = hash_ + SUFFIXES[kind]
        self._units.add(name)
        if (page := self._page(hash_)) is not None:
            self._tell(MEDIUM, name, page)

    def unit_removed(self, kind: str, hash_: bytes, /) -> None:
        name = hash_ + SUFFIXES[kind]
        self._units.discard(name)
        self._retract(MEDIUM, name)

    def units_cleared(self, kind: str, /) -> None:
        for name in [name for name in self._units if name[HASH_SIZE:] == SUFFIXES[kind]]:
            self.unit_removed(kind, name[:HASH_SIZE])

    # ---- records

    def _follow(self, medium: str, changes: Mapping[bytes, bool]) -> None:
        """Tell of records of a tier that came (True) or went."""
        for name, is_there in changes.items():
            if not is_there:
                self._retract(medium, name)
            # Whoever can write to a store may have put anything there.
            elif name[HASH_SIZE:] in self._groups and (page := self._page(name[:HASH_SIZE])):
                self._tell(medium, name, page)

    # ---- what is known and told

    def _names(self, hash_: bytes) -> Iterator[bytes]:
        """Names of the units of a page, of all kinds."""
        return (hash_ + suffix for suffix in self._groups)

    def _page(self, hash_: bytes) -> Stored | None:
        return self._in_memory.get(hash_) or self._evicted.get(hash_)

    def _tell(self, medium: str, name: bytes, page: Stored) -> None:
        told, group = self._told[medium], self._groups[name[HASH_SIZE:]]
        # One that is not taken stays untold: nobody expects more than there is.
        if name not in told and self._publisher.stored(page, medium=medium, group=group):
            told.add(name)

    def _retract(self, medium: str, name: bytes) -> None:
        told = self._told[medium]
        if name in told:
            told.remove(name)
            hash_, group = name[:HASH_SIZE], self._groups[name[HASH_SIZE:]]
            self._is_behind |= not self._publisher.removed(hash_, medium=medium, group=group)

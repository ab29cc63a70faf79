"""Snapshots: recurrent states that other prompts can continue from, by the hash of the page before them.

Knows ids only: the runner owns the arrays, and keeps and drops them by these ids.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import ValuesView
from enum import IntEnum

from mlxserve.cache.pages import PagePool
from mlxserve.core.stats import StateStats


class Worth(IntEnum):
    """The order in which snapshots are evicted."""

    LOST = 0  # the page before it was evicted: it is not found until that is computed again
    USUAL = 1
    KEPT = 2  # its page is protected for some time
    PINNED = 3  # of a named prefix


class Snapshots:
    """The findable snapshots, least recently used first."""

    def __init__(self, pool: PagePool, stats: StateStats) -> None:
        """Take the pool of full pages, whose hashes identify the snapshots."""
        self._pool = pool
        self._stats = stats
        stats.num_snapshots = 0
        self._ids: OrderedDict[bytes, int] = OrderedDict()
        self.has = self._ids.__contains__
        self.id_of = self._ids.__getitem__
        self.dropped: list[int] = []  # ids that are not needed any more

    def __len__(self) -> int:
        return len(self._ids)

    def ids(self) -> ValuesView[int]:
        return self._ids.values()

    def use(self, hash_: bytes) -> int:
        """Return the id of the snapshot that a request restores, and mark it as the last used one."""
        self._ids.move_to_end(hash_)
        self._stats.num_restored += 1
        return self._ids[hash_]

    def add(self, hash_: bytes | None, id_: int) -> None:
        """Make a snapshot findable, unless a token of its last page was dropped (None), or it is known."""
        if hash_ is None or hash_ in self._ids:
            self.dropped.append(id_)
            return
        self._ids[hash_] = id_
        self._stats.num_snapshots = len(self._ids)

    def evict(self, max_worth: Worth) -> bool:
        """Drop the least valuable snapshot, worth at most `max_worth`. False if there is none."""
        victim = min(self._ids, key=self._worth, default=None)
        if victim is None or self._worth(victim) > max_worth:
            return False
        self._drop(victim)
        self._stats.num_evicted += 1
        return True

    def drop_lost(self) -> None:
        """Drop the snapshots after pages that are not cached any more."""
        for hash_ in [hash_ for hash_ in self._ids if not self._pool.index.is_known(hash_)]:
            self._drop(hash_)

    def _worth(self, hash_: bytes) -> Worth:
        page = self._pool.index.find(hash_)
        if page is None:
            return Worth.LOST
        if self._pool.is_pinned(hash_):
            return Worth.PINNED
        return Worth.KEPT if self._pool.order.is_kept(page) else Worth.USUAL

    def _drop(self, hash_: bytes) -> None:
        self.dropped.append(self._ids.pop(hash_))
        self._stats.num_snapshots = len(self._ids)

"""FullPages: keys and values of every position, in the engine's pool of pages.

The page tables own the pool; here is what the disk needs to know of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mlxserve.cache.kinds.kind import Has, Units, Uses
from mlxserve.cache.kinds.reclaim import FullPageReclaimer, Reclaimer
from mlxserve.cache.pages import PagePool
from mlxserve.request import LiveRequest


class FullPages:
    """The units of the full-attention layers: pages of one pool."""

    name = "pages"

    def __init__(self, pool: PagePool, others: Sequence[Reclaimer] = ()) -> None:
        """Take the pool, and the pages of `others`: kinds that limit how much of a prefix is usable."""
        self._pool = pool
        self.reclaimer: Reclaimer = FullPageReclaimer(pool, self.name, others)
        self.has = pool.index.is_known
        self.unit_of = pool.index.page_of

    def pinned(self) -> Iterable[bytes]:
        return (hash_ for hash_ in map(self._pool.index.hash_of, self._pool.pinned()) if hash_)

    def used_by(self, request: LiveRequest) -> Uses:
        """Return the hashes from the first page on: a page is useless without those before it."""
        return Uses(request.page_hashes[: len(request.page_table)])

    def unsaved(self, request: LiveRequest, is_on_disk: Has) -> Units:
        pool = self._pool
        held = zip(request.page_hashes, request.page_table, strict=False)
        own = {
            h: page for h, page in held if pool.is_exclusive(page) and pool.index.hash_of(page) == h
        }
        return tuple((hash_, page) for hash_, page in own.items() if not is_on_disk(hash_))

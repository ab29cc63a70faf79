"""DiskPages: the second level of the prefix cache: which pages are written to disk, and which are read.

    in memory ── preempted, in mode SWAP: Save ──▶ on disk      (others are written by the engine)
        ▲                                            │
        └──── Load ◀── a request that finds them ◀───┘          (where that fails, it computes them)

A page on disk is found by its hash, after the last page that is found in memory; so are the units with which
a request continues after its pages. What memory has is not read. A request whose units are being read holds
those that they are read to, and the plan skips it until they are there. So no request that holds pages waits
for one that holds none (vllm#44560).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from typing import Protocol

from mlxserve.cache.kinds.kind import EndKind, Has, UnitKind, Units, Uses, num_usable
from mlxserve.cache.pages import PagePool
from mlxserve.request import LiveRequest, PageRun

LOAD_PAGES = 32  # read at once for one request; bounds the memory of pages on their way
_SOON = 64  # pages that can be allocated before one of those evicted next is lost


class Disk(Protocol):
    """Records of the units of each kind, by the hashes of pages. Any record may be lost at any time."""

    def num_leading(self, hashes: Sequence[bytes], /) -> int:
        """Return how many of these full pages are on disk, from the first one on."""

    def has(self, kind: str, hash_: bytes, /) -> bool:
        """Return True if the unit of this kind with this hash is on disk."""

    def pays(self, num_tokens: int, num_units: Mapping[str, int], /) -> bool:
        """Return True if reading `num_units` of each kind is probably faster than computing `num_tokens`."""

    def use(self, uses: Mapping[str, Uses], /) -> None:
        """Record that a request has just used these units, by their kinds."""

    def unwritten(self, kind: str, /) -> Iterator[bytes]:
        """Yield used units that are not on disk and would be kept there, the last used first."""

    def is_unwritten(self, kind: str, hash_: bytes, /) -> bool:
        """Return True if a unit was used, is not on disk and would be kept there."""

    def forget(self, kind: str, hashes: Iterable[bytes], /) -> None:
        """Forget that these units were used: they are no longer in memory."""


@dataclass(frozen=True, slots=True)
class Save:
    """Units to write to disk before they are overwritten.

    units: (kind, units) of each kind, full pages first
    number: that of the preemption, if it is to be logged once the disk has answered
    """

    request_id: str
    units: tuple[tuple[str, Units], ...]
    number: int | None = None


@dataclass(frozen=True, slots=True)
class Load:
    """The pages of `run` to read into these pages of the pool.

    num_saved: pages to compute if these are not read
    ends: with the last pages, the units of each other kind that the request needs to continue
    """

    request: LiveRequest
    run: PageRun
    pages: tuple[int, ...]
    num_saved: int
    ends: tuple[Units, ...] = ()

    @property
    def is_last(self) -> bool:
        """True if the units of the other kinds are read with these pages."""
        return bool(self.ends)

    @property
    def is_wanted(self) -> bool:
        """True while its request waits for these pages."""
        return self.request.loading is self.run


@dataclass(slots=True)
class DiskPlan:
    """The saves and loads to begin before the planned step is launched."""

    saves: list[Save] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.saves or self.loads)


class DiskPages:
    """Plans saves and loads. The state of a load is in its request: `disk_end`, `loading`."""

    def __init__(
        self,
        pool: PagePool,
        disk: Disk | None,
        kinds: Sequence[UnitKind],
        ends: Sequence[EndKind] = (),
    ) -> None:
        """Take the pool, the disk and all kinds.

        kinds: the full pages, then the ends
        ends: kinds that limit how much of a prefix is usable
        """
        self._pool = pool
        self._disk = disk
        self._kinds = tuple(kinds)
        self._ends = tuple(ends)
        self._plan = DiskPlan()

    def pop_plan(self) -> DiskPlan:
        """Return the plan since the last call."""
        plan, self._plan = self._plan, DiskPlan()
        return plan

    def reach(
        self,
        hashes: Sequence[bytes],
        first: int,
        num_known: int,
        end: int,
        num_whole: Callable[[int], int] | None = None,
    ) -> int:
        """Return after how many of the first `end` pages a request can continue if it reads from disk.

        That is `first` if there is nothing to read, or computing is faster.

        first: pages that it can continue after without reading
        num_known: pages in memory
        num_whole: tells how many of so many pages divide no image that one chunk computes; None: all of them
        """
        if self._disk is None:
            return first
        reach = num_known + self._disk.num_leading(hashes[num_known:end])
        if self._ends and reach > first:
            reach = num_usable(self._ends, hashes, reach, self._is_available)
        if num_whole is not None and (whole := num_whole(reach)) < reach:
            return self.reach(hashes, first, min(num_known, whole), whole, num_whole)
        if reach <= first:
            return first
        num_units = {end.name: end.num_to_read(hashes, reach) for end in self._ends}
        num_units[self._kinds[0].name] = max(0, reach - num_known)
        is_worth_it = self._disk.pays((reach - first) * self._pool.page_size, num_units)
        return reach if is_worth_it else first

    def save(self, request: LiveRequest, number: int | None = None) -> Save | None:
        """Plan to write the request's full pages that no other request holds and that are not on disk.

        Returns None if there are none. `number` is that of `Save`.
        """
        if self._disk is None:
            return None
        units = [(kind.name, kind.unsaved(request, self._is_on_disk(kind))) for kind in self._kinds]
        if not any(each for _, each in units):
            return None
        save = Save(request.id, tuple(units), number)
        self._plan.saves.append(save)
        return save

    def _is_on_disk(self, kind: UnitKind) -> Has:
        assert self._disk is not None, "there is a disk"
        return partial(self._disk.has, kind.name)

    def _is_available(self, end: EndKind) -> Has:
        is_on_disk = self._is_on_disk(end)
        return (
            (lambda hash_: end.has(hash_) or is_on_disk(hash_)) if end.holds_found else is_on_disk
        )

    def use(self, request: LiveRequest) -> None:
        """Record that a request has just used its pages."""
        if self._disk is None:
            return
        self._disk.use({kind.name: kind.used_by(request) for kind in self._kinds})

    def unwritten(self, kind: UnitKind, limit: int) -> list[tuple[bytes, int]]:
        """Return up to `limit` (hash, unit) that are not on disk and would be kept there.

        Those of named prefixes come first, then the last used ones.
        """
        if self._disk is None:
            return []
        disk, name = self._disk, kind.name
        found: dict[bytes, int] = {}
        gone: list[bytes] = []
        pinned = (hash_ for hash_ in kind.pinned() if disk.is_unwritten(name, hash_))
        for hash_ in chain(pinned, disk.unwritten(name)):
            if kind.has(hash_):
                found[hash_] = kind.unit_of(hash_)
                if len(found) == limit:
                    break
            else:
                gone.append(hash_)
        disk.forget(name, gone)
        return list(found.items())

    def endangered(self, limit: int) -> list[tuple[bytes, int]]:
        """Return up to `limit` (hash, page) of unwritten full pages that will be evicted soon."""
        if self._disk is None:
            return []
        name = self._kinds[0].name
        num_soon = _SOON - self._pool.blank.count
        found = ((self._pool.index.hash_of(p), p) for p in self._pool.order.first(max(0, num_soon)))
        missing = (
            (hash_, page)
            for hash_, page in found
            if hash_ is not None and self._disk.is_unwritten(name, hash_)
        )
        return list(islice(missing, limit))

    def endangered_at_end(self, kind: UnitKind, limit: int) -> list[tuple[bytes, int]]:
        """Return up to `limit` (hash, unit) of unwritten units whose ends will be dropped soon."""
        if self._disk is None or kind.reclaimer is None:
            return []
        is_unwritten = partial(self._disk.is_unwritten, kind.name)
        found = (
            (hash_, page) for hash_, page in kind.reclaimer.next_dropped() if is_unwritten(hash_)
        )
        return list(islice(found, limit))

    def num_left(self, request: LiveRequest) -> int:
        """Return how many tokens after its computed ones the request will read next."""
        page_size = self._pool.page_size
        if request.num_computed < request.disk_resume * page_size:
            return 0
        return max(0, request.disk_end * page_size - request.num_computed)

    def skip_lost(self, request: LiveRequest) -> None:
        """Skip a lost page, the one after the computed ones: read those after it once it is computed.

        With images that one chunk computes nothing more is read: the chunk might end inside one.
        """
        resume = request.num_computed // self._pool.page_size + 1
        num_pages = 0
        if not self._ends and not request.asked.blocks:
            reach = self.reach(request.page_hashes, resume, resume, request.disk_end)
            num_pages = reach - resume
        request.disk_resume = resume if num_pages else 0
        request.disk_end = resume + num_pages if num_pages else 0

    def load(self, request: LiveRequest, end: int) -> None:
        """Plan to read the request's pages up to page `end` into its page table, after the computed ones.

        With page `disk_end` the units of the other kinds are read, where memory lacks them.
        """
        first = request.num_computed // self._pool.page_size
        ends: tuple[Units, ...] = ()
        if end == request.disk_end:
            ends = tuple(kind.load(request, end) for kind in self._ends)
        assert first < end <= request.disk_end or any(ends), "nothing is to be read"
        request.loading = PageRun(first, tuple(request.page_hashes[first:end]))
        pages = tuple(request.page_table[first:end])
        num_saved = end - (request.disk_base if ends else first)
        self._plan.loads.append(Load(request, request.loading, pages, num_saved, ends))

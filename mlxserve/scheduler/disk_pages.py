"""DiskPages: the second floor of the prefix cache. Which pages go to disk, and which come back.

    in memory ── preempted, in mode SWAP: Save ──▶ on disk      (others are written by the engine)
        ▲                                            │
        └──── Load ◀── a request that finds them ◀───┘          (where that fails, it computes them)

A page on disk is found by its hash, after the last page that is found in memory. A request whose
pages are being read holds the pages that they are read to, and the plan skips it until they are
there. So no request that holds pages waits for one that holds none (vllm#44560).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
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
    """Records of the units of each kind, by the hashes of pages. They may be lost at any time."""

    def num_leading(self, hashes: Sequence[bytes], /) -> int:
        """How many of these full pages are there, from the first one on."""

    def has(self, kind: str, hash_: bytes, /) -> bool:
        """Whether the unit of this kind with this hash is there."""

    def pays(self, num_tokens: int, /) -> bool:
        """Whether reading the pages of `num_tokens` is probably faster than computing them."""

    def use(self, uses: Mapping[str, Uses], /) -> None:
        """Note that a request has used these units until now, by their kinds."""

    def unwritten(self, kind: str, /) -> Iterator[bytes]:
        """Used units that are not on disk and would be kept there, the last used first."""

    def is_unwritten(self, kind: str, hash_: bytes, /) -> bool:
        """Whether a unit was used, is not on disk and would be kept there."""

    def forget(self, kind: str, hashes: Iterable[bytes], /) -> None:
        """These units are no longer in memory."""


@dataclass(frozen=True, slots=True)
class Save:
    """Write units to disk, before anything else is written to them.

    units: of each kind, with their hashes; those of full pages first
    number: of the preemption, if it is to be logged once it is known what the disk took
    """

    request_id: str
    units: tuple[tuple[str, Units], ...]
    number: int | None = None


@dataclass(frozen=True, slots=True)
class Load:
    """Read the pages of `run` into these pages of the pool.

    ends: where these are the last ones: units of each other kind, with which the request goes on after them
    """

    request: LiveRequest
    run: PageRun
    pages: tuple[int, ...]
    ends: tuple[Units, ...] = ()

    @property
    def is_last(self) -> bool:
        """Whether what other kinds need is read with these pages."""
        return bool(self.ends)

    @property
    def is_wanted(self) -> bool:
        """Whether its request still waits for these pages."""
        return self.request.loading is self.run


@dataclass(slots=True)
class DiskPlan:
    """What the engine has to do before it launches the step that was planned."""

    saves: list[Save] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.saves or self.loads)


class DiskPages:
    """Plans the moves. What a request reads is in the request: `disk_end`, `loading`."""

    def __init__(
        self,
        pool: PagePool,
        disk: Disk | None,
        kinds: Sequence[UnitKind],
        ends: Sequence[EndKind] = (),
    ) -> None:
        """kinds: the full pages, and then the ends: pages are of use only up to one after which each of these
        can go on"""
        self._pool = pool
        self._disk = disk
        self._kinds = tuple(kinds)
        self._ends = tuple(ends)
        self._plan = DiskPlan()

    def pop_plan(self) -> DiskPlan:
        """What was planned since the last call."""
        plan, self._plan = self._plan, DiskPlan()
        return plan

    def num_found(self, hashes: Sequence[bytes], first: int, end: int) -> int:
        """How many of the pages first .. end are to be read, from the first one on, instead of
        computed."""
        if self._disk is None:
            return 0
        num_pages = self._disk.num_leading(hashes[first:end])
        if self._ends and num_pages:
            reach = num_usable(self._ends, hashes, first + num_pages, self._is_on_disk)
            num_pages = max(0, reach - first)
        if not num_pages or not self._disk.pays(num_pages * self._pool.page_size):
            return 0
        return num_pages

    def save(self, request: LiveRequest, number: int | None = None) -> Save | None:
        """Have its full pages written that no other request holds, and that are not on disk.

        None if there are none. `number` as in `Save`.
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

    def use(self, request: LiveRequest) -> None:
        """Note that a request has used its pages until now."""
        if self._disk is None:
            return
        self._disk.use({kind.name: kind.used_by(request) for kind in self._kinds})

    def unwritten(self, kind: UnitKind, limit: int) -> list[tuple[bytes, int]]:
        """(hash, unit) of units that are not on disk and would be kept there: those of named prefixes, then the
        last used ones; up to `limit`."""
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
        """(hash, page) of full pages as in `unwritten` that will be evicted soon; up to `limit`."""
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
        """(hash, unit) of units as in `unwritten` of places that are given up soon; up to `limit`."""
        if self._disk is None or kind.lending is None:
            return []
        is_unwritten = partial(self._disk.is_unwritten, kind.name)
        found = ((hash_, page) for hash_, page in kind.lending.next_lost() if is_unwritten(hash_))
        return list(islice(found, limit))

    def num_left(self, request: LiveRequest) -> int:
        """Tokens that the request goes on to read, from the one after its last computed one."""
        page_size = self._pool.page_size
        if request.num_computed < request.disk_resume * page_size:
            return 0
        return max(0, request.disk_end * page_size - request.num_computed)

    def skip_lost(self, request: LiveRequest) -> None:
        """The page after its last computed one is lost: read those after it once it is computed."""
        resume = request.num_computed // self._pool.page_size + 1
        num_pages = 0
        if not self._ends:
            num_pages = self.num_found(request.page_hashes, resume, request.disk_end)
        request.disk_resume = resume if num_pages else 0
        request.disk_end = resume + num_pages if num_pages else 0

    def load(self, request: LiveRequest, end: int) -> None:
        """Have its pages up to page `end` read into its page table, after what is computed."""
        first = request.num_computed // self._pool.page_size
        assert first < end <= request.disk_end, "nothing is to be read"
        request.loading = PageRun(first, tuple(request.page_hashes[first:end]))
        pages = tuple(request.page_table[first:end])
        ends: tuple[Units, ...] = ()
        if end == request.disk_end:
            ends = tuple(kind.load(request, end) for kind in self._ends)
        self._plan.loads.append(Load(request, request.loading, pages, ends))

"""DiskPages: the second floor of the prefix cache. Which pages go to disk, and which come back.

    in memory ── preempted, in mode SWAP: Save ──▶ on disk      (others are written by the engine)
        ▲                                            │
        └──── Load ◀── a request that finds them ◀───┘          (where that fails, it computes them)

A page on disk is found by its hash, after the last page that is found in memory. A request whose
pages are being read holds the pages that they are read to, and the plan skips it until they are
there. So no request that holds pages waits for one that holds none (vllm#44560).
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Protocol

from mlxserve.cache.pages import PagePool
from mlxserve.request import LiveRequest, PageRun
from mlxserve.scheduler.windows import Windows

LOAD_PAGES = 32  # read at once for one request; bounds the memory of pages on their way
_SOON = 64  # pages that can be allocated before one of those evicted next is lost


class Disk(Protocol):
    """What is on disk, by the hashes of pages. It may be lost at any time."""

    def num_leading(self, hashes: Sequence[bytes], /) -> int:
        """How many of these pages are there, from the first one on."""

    def has_state(self, hash_: bytes, /) -> bool:
        """Whether the recurrent state after this page is there."""

    def pays(self, num_tokens: int, /) -> bool:
        """Whether reading the pages of `num_tokens` is probably faster than computing them."""

    def has_window(self, hash_: bytes, /) -> bool:
        """Whether the page with this hash of layers with a window is there."""

    def use(self, hashes: Sequence[bytes], /) -> None:
        """Note that a request has used these pages until now, each with those before it."""

    def use_windows(self, hashes: Sequence[bytes], /) -> None:
        """The same of pages of layers with a window that are worth keeping, the last one first."""

    def unwritten(self) -> Iterator[bytes]:
        """Used pages that are not on disk and would be kept there, the last used first."""

    def unwritten_states(self) -> Iterator[bytes]:
        """The same of recurrent states, by the page before each."""

    def unwritten_windows(self) -> Iterator[bytes]:
        """As `unwritten`, of layers with a window."""

    def is_unwritten(self, hash_: bytes, /) -> bool:
        """Whether a page was used, is not on disk and would be kept there."""

    def forget(self, hashes: Iterable[bytes], /) -> None:
        """These pages are no longer in memory."""

    def forget_states(self, hashes: Iterable[bytes], /) -> None:
        """The recurrent states after these pages are not in memory."""

    def forget_windows(self, hashes: Iterable[bytes], /) -> None:
        """These pages of layers with a window are not in memory."""


@dataclass(frozen=True, slots=True)
class Save:
    """Write these pages of the pool to disk, before anything else is written to them.

    number: of the preemption, if it is to be logged once it is known what the disk took
    windows: pages of layers with a window, by their hashes
    """

    request_id: str
    hashes: tuple[bytes, ...]
    pages: tuple[int, ...]
    number: int | None = None
    windows: tuple[tuple[bytes, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Load:
    """Read the pages of `run` into these pages of the pool.

    with_state: and the recurrent state after the last one, or the window before its end
    windows: the pages of that window, by their hashes
    """

    request: LiveRequest
    run: PageRun
    pages: tuple[int, ...]
    with_state: bool = False
    windows: tuple[tuple[bytes, int], ...] = ()

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
        *,
        has_states: bool = False,
        windows: Windows | None = None,
    ) -> None:
        """`has_states`: pages are of use only up to one with a recurrent state after it. `windows`: or up
        to one before whose end the whole window is there."""
        self._pool = pool
        self._disk = disk
        self._has_states = has_states
        self._windows = windows
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
        if self._has_states:
            while num_pages and not self._disk.has_state(hashes[first + num_pages - 1]):
                num_pages -= 1
        elif self._windows is not None and num_pages:
            has_window = self._disk.has_window
            end = self._windows.num_usable(hashes, first + num_pages, has_window)
            num_pages = max(0, end - first)
        if not num_pages or not self._disk.pays(num_pages * self._pool.page_size):
            return 0
        return num_pages

    def save(self, request: LiveRequest, number: int | None = None) -> Save | None:
        """Have its full pages written that no other request holds, and that are not on disk.

        None if there are none. `number` as in `Save`.
        """
        if self._disk is None:
            return None
        pages: dict[bytes, int] = {}
        for hash_, page in zip(request.page_hashes, request.page_table, strict=False):
            is_own = self._pool.is_exclusive(page) and self._pool.hash_of(page) == hash_
            if is_own and not self._disk.num_leading([hash_]):
                pages[hash_] = page
        windows = self._windows_to_save(request, self._disk)
        if not pages and not windows:
            return None
        save = Save(request.id, tuple(pages), tuple(pages.values()), number, windows)
        self._plan.saves.append(save)
        return save

    def _windows_to_save(self, request: LiveRequest, disk: Disk) -> tuple[tuple[bytes, int], ...]:
        """Pages of the window before the end of its last full page that are not on disk."""
        if self._windows is None:
            return ()
        pool, first = self._windows.pool, request.window_first
        held = zip(request.page_hashes[first:], request.window_table[first:], strict=False)
        own = [(hash_, page) for hash_, page in held if pool.hash_of(page) == hash_]
        return tuple((hash_, page) for hash_, page in own if not disk.has_window(hash_))

    def use(self, request: LiveRequest) -> None:
        """Note that a request has used its pages until now."""
        if self._disk is None:
            return
        self._disk.use(request.page_hashes[: len(request.page_table)])
        if self._windows is not None:
            self._disk.use_windows(self._windows.worth_keeping(request))

    def unwritten(self, limit: int) -> list[tuple[bytes, int]]:
        """(hash, page) of pages that are not on disk and would be kept there: those of named
        prefixes, then the last used ones; up to `limit`."""
        if self._disk is None:
            return []
        disk, pool = self._disk, self._pool
        pinned = (hash_ for hash_ in map(pool.hash_of, pool.pinned()) if hash_ is not None)
        found: dict[bytes, int] = {}
        gone: list[bytes] = []
        for hash_ in chain(filter(disk.is_unwritten, pinned), disk.unwritten()):
            if pool.is_known(hash_):
                found[hash_] = pool.page_of(hash_)
                if len(found) == limit:
                    break
            else:
                gone.append(hash_)
        disk.forget(gone)
        return list(found.items())

    def endangered(self, limit: int) -> list[tuple[bytes, int]]:
        """(hash, page) of pages as in `unwritten` that will be evicted soon; up to `limit`."""
        if self._disk is None:
            return []
        num_soon = _SOON - self._pool.num_blank
        found = ((self._pool.hash_of(p), p) for p in self._pool.eviction_order(max(0, num_soon)))
        missing = (
            (hash_, page)
            for hash_, page in found
            if hash_ is not None and self._disk.is_unwritten(hash_)
        )
        return list(islice(missing, limit))

    def unwritten_states(self, states: Container[bytes], limit: int) -> list[bytes]:
        """Those of these pages whose state is not on disk and would be kept there; up to `limit`."""
        if self._disk is None:
            return []
        found: list[bytes] = []
        gone: list[bytes] = []
        for hash_ in self._disk.unwritten_states():
            (found if hash_ in states else gone).append(hash_)
            if len(found) == limit:
                break
        self._disk.forget_states(gone)
        return found

    def unwritten_windows(self, limit: int) -> list[tuple[bytes, int]]:
        """As `unwritten`, of layers with a window: windows at the ends of prompts and answers."""
        if self._disk is None or self._windows is None:
            return []
        pool = self._windows.pool
        found: dict[bytes, int] = {}
        gone: list[bytes] = []
        for hash_ in self._disk.unwritten_windows():
            if pool.is_known(hash_):
                found[hash_] = pool.page_of(hash_)
                if len(found) == limit:
                    break
            else:
                gone.append(hash_)
        self._disk.forget_windows(gone)
        return list(found.items())

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
        if not self._has_states and self._windows is None:
            num_pages = self.num_found(request.page_hashes, resume, request.disk_end)
        request.disk_resume = resume if num_pages else 0
        request.disk_end = resume + num_pages if num_pages else 0

    def load(self, request: LiveRequest, end: int) -> None:
        """Have its pages up to page `end` read into its page table, after what is computed."""
        first = request.num_computed // self._pool.page_size
        assert first < end <= request.disk_end, "nothing is to be read"
        request.loading = PageRun(first, tuple(request.page_hashes[first:end]))
        pages = tuple(request.page_table[first:end])
        has_ends = self._has_states or self._windows is not None
        with_state = has_ends and end == request.disk_end
        windows: tuple[tuple[bytes, int], ...] = ()
        if with_state and self._windows is not None:
            first = request.window_first
            held = request.window_table[first:end]
            windows = tuple(zip(request.page_hashes[first:end], held, strict=True))
        self._plan.loads.append(Load(request, request.loading, pages, with_state, windows))

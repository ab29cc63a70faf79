"""Kind: what a group of layers keeps of a sequence, behind one protocol.

    FullPages    keys and values of every position, in the pages of the engine's pool
    WindowPages  keys and values of the last positions, in pages of a pool of their own
    StateSlots   a recurrent state, and snapshots of it at page boundaries

Every kind has units (pages or states) that are found by the hash of a page, and records of them on disk. All
but full pages are *ends*: a cached prefix is of use only up to a page after which every end can go on. vLLM
has one manager for each kind behind an interface, and a coordinator that intersects their prefix hits
(`vllm/v1/core/single_type_kv_cache_manager.py`, `kv_cache_coordinator.py`).

Page tables, the disk and the runner hold a tuple of kinds and loop over it. A new kind is one file here and
a line in `mlxserve/build.py`.
"""

# ruff: noqa: ARG002, B027 (a kind overrides what concerns it)

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol, Self, TypeVar

from mlxserve.cache.kinds.lending import Lending
from mlxserve.cache.pages import PagePool
from mlxserve.request import CacheMiss, Chunk, LiveRequest

UNBOUNDED = 1 << 30  # units that a kind can give where it has no limit of its own

Has = Callable[[bytes], bool]  # whether the unit of a hash is there


Units = tuple[tuple[bytes, int], ...]  # units of a kind, each with the hash by which it is found


class Start(NamedTuple):
    """Where a request begins.

    num_pages: that it found in memory
    num_to_read: pages after these that are read from disk
    num_known: cached pages, whether or not all kinds can go on after them
    is_cached: whether the request uses the prefix cache
    """

    num_pages: int
    num_to_read: int
    num_known: int
    is_cached: bool


class Uses(NamedTuple):
    """Hashes of units that a request has used, the most valuable first.

    num_before: other units that count as used later than all of these
    """

    hashes: Sequence[bytes]
    num_before: int = 0


class UnitKind(Protocol):
    """Units of one kind, as the disk sees them."""

    @property
    def name(self) -> str:
        """Name of the kind, by which the runner and the disk know it."""

    @property
    def lending(self) -> Lending | None:
        """What its pages are worth; None if its units are no pages."""

    def has(self, hash_: bytes, /) -> bool:
        """Whether the unit with this hash is in memory."""

    def unit_of(self, hash_: bytes, /) -> int:
        """Unit with this hash, which is in memory."""

    def pinned(self) -> Iterable[bytes]:
        """Hashes of units that stay, and are written to disk before others."""

    def used_by(self, request: LiveRequest, /) -> Uses:
        """Units worth keeping of what the request has used."""

    def unsaved(self, request: LiveRequest, is_on_disk: Has, /) -> Units:
        """Units to write before the request gives its pages up, because they are lost then."""


class Room:
    """How many requests a kind has units for, and how far they may run. Unbounded where nothing is overridden.

    num_reserved: free units that no request which waits may have
    """

    def num_free(self) -> int:
        """Pages that all tables together could grow by."""
        return UNBOUNDED

    def num_own(self, request: LiveRequest) -> int:
        """Units that would be free if the request gave its own back."""
        return 0

    def can_grow(self, request: LiveRequest, num_pages: int) -> bool:
        """Whether there is room to cover `num_pages` pages."""
        return True

    def max_pages(self, request: LiveRequest) -> int:
        """Pages that the table of a running prompt may cover."""
        return UNBOUNDED

    # ---- of a request that waits

    def num_reserved(self, running: Iterable[LiveRequest]) -> int:
        """Free units that the prompts of these running requests still need."""
        return 0

    def num_lacking(self, request: LiveRequest, num_cached: int, num_reserved: int) -> int:
        """Units that it needs beyond those that it may have; 0 or less if it has enough."""
        return 0

    def num_growable_from(self, request: LiveRequest, num_cached: int, num_reserved: int) -> int:
        """Pages that it may grow by if it begins after `num_cached` pages."""
        return UNBOUNDED

    def can_read(self, num_reserved: int) -> bool:
        """Whether there is room for what is read from disk at the end of a prefix."""
        return True


class EndKind(ABC):
    """A kind that limits how much of a cached prefix can be used, and how far requests run.

    What is not overridden is what a kind does that has room for every request and takes no part in
    the matter. `room` is what requests may have of it.
    """

    name: str
    missing: CacheMiss  # reason for a prompt whose pages are cached while this kind cannot go on from them
    allows_drafts = True  # rows of rejected tokens can be written again
    pool: PagePool | None = None  # pages of its own, if its units are pages
    room: Room = Room()
    lending: Lending | None = None  # where its units are pages of memory that it may share
    names_units = False  # its units are named by `plan` and `load`, and dropped by these names
    has_table = False  # chunks have the request's `window_table`

    @abstractmethod
    def renewed(self, pool: PagePool) -> Self:
        """An empty one of the same size, beside `pool` of full pages."""

    @abstractmethod
    def has(self, hash_: bytes) -> bool:
        """Whether the unit with this hash is in memory."""

    @abstractmethod
    def unit_of(self, hash_: bytes) -> int:
        """Unit with this hash, which is in memory."""

    # ---- what is found

    @abstractmethod
    def num_usable(self, hashes: Sequence[bytes], num_pages: int, has: Has | None = None) -> int:
        """Number of the first `num_pages` pages, which are cached, after which a sequence can go on.

        has: whether a unit is there; None asks the memory
        """

    # ---- requests begin, grow and end

    def begin(self, request: LiveRequest, start: Start) -> None:
        """The request runs, from the end of its first pages on."""

    def begin_again(self, request: LiveRequest, num_pages: int) -> None:
        """What was to be read is lost: begin after `num_pages` pages in memory instead."""

    def grow(self, request: LiveRequest, num_pages: int) -> None:
        """Cover `num_pages` pages."""

    def publish(self, request: LiveRequest, first: int, end: int, parent: bytes) -> None:
        """Make units of pages first .. end findable; `parent` is the hash before page `first`."""

    def pass_by(self, request: LiveRequest, position: int) -> None:
        """Give back what no row from `position` on needs; all before it is computed and read."""

    def expect(self, request: LiveRequest, num_pages: int) -> None:
        """A follower will continue after the first `num_pages` pages of the running request."""

    def stop(self, request: LiveRequest) -> None:
        """The request runs no more; unread steps may still use what it holds."""

    def release(self, request: LiveRequest) -> None:
        """Give its units back: no unread step uses them."""

    # ---- steps

    def plan(self, chunks: list[Chunk]) -> list[Chunk]:
        """The chunks of a step with what they do to this kind."""
        return chunks

    def commit(self, chunk: Chunk) -> None:
        """The chunk has been computed."""

    def pop_dropped(self) -> list[int]:
        """Names of units that are not needed any more, once the step that was planned last is launched."""
        return []

    def ids(self) -> set[int]:
        """Names of all units that were planned, and not returned by `pop_dropped`."""
        return set()

    # ---- the disk

    def pinned(self) -> Iterable[bytes]:
        """Hashes of units that are written to disk before others."""
        return ()

    def used_by(self, request: LiveRequest) -> Uses:
        """Units worth keeping of what the request has used."""
        return Uses(())

    def unsaved(self, request: LiveRequest, is_on_disk: Has) -> Units:
        """Units to write before the request gives its pages up, because they are lost then."""
        return ()

    def load(self, request: LiveRequest, end: int) -> Units:
        """Units to read so that the request can go on after page `end`."""
        return ()

    def loaded(self, request: LiveRequest, units: Units, parent: Callable[[int], bytes]) -> None:
        """They were read, and the request has `num_computed` tokens.

        parent: the hash before a page of the request
        """

    # ---- what stays

    def pin(self, prefix: LiveRequest) -> None:
        """Keep what continues a named prefix that was computed."""

    def unpin(self, prefix_id: str) -> None:
        """End that; no-op if there is no such prefix."""

    def keep(self, hashes: Sequence[bytes], until: float) -> None:
        """Protect from eviction what continues a prefix with these hashes, until a time in seconds."""

    def expire(self, now: float) -> None:
        """End protections until before `now`."""

    def forget(self, hashes: Iterable[bytes]) -> None:
        """Forget the units with these hashes that no request holds."""

    def reset(self) -> None:
        """Forget all units but those of named prefixes; the pages were reset before."""

    def check(self, running: Sequence[LiveRequest], holders: Sequence[LiveRequest]) -> None:
        """Audit. Raises AssertionError.

        holders: requests whose pages are not released, the running ones included
        """


def num_usable(
    ends: Sequence[EndKind],
    hashes: Sequence[bytes],
    num_pages: int,
    has: Callable[[EndKind], Has] | None = None,
) -> int:
    """Number of the first `num_pages` cached pages after which every end can go on."""
    before = -1
    while num_pages != before:
        before = num_pages
        for end in ends:
            num_pages = end.num_usable(hashes, num_pages, None if has is None else has(end))
        if len(ends) == 1:
            break
    return num_pages


EndT = TypeVar("EndT", bound=EndKind)


def find(ends: Sequence[EndKind], kind: type[EndT]) -> EndT | None:
    """Return the kind of this class, if the model has it."""
    return next((end for end in ends if isinstance(end, kind)), None)

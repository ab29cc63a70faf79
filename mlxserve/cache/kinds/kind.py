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
from typing import NamedTuple, Protocol, Self, TypeVar, runtime_checkable

from mlxserve.cache.kinds.reclaim import Reclaimer
from mlxserve.cache.pages import PagePool
from mlxserve.request import CacheMiss, Chunk, LiveRequest

UNBOUNDED = 1 << 30  # units of a kind that has no limit of its own

Has = Callable[[bytes], bool]  # tells if the unit with a hash is available


Units = tuple[tuple[bytes, int], ...]  # (hash, unit)


class Start(NamedTuple):
    """Where a request begins.

    num_pages: pages after which it continues
    is_reading: True if it reads from disk what memory lacks of these pages and of the units to continue
    num_known: cached pages, whether or not all kinds can go on after them
    is_cached: whether the request uses the prefix cache
    """

    num_pages: int
    is_reading: bool
    num_known: int
    is_cached: bool


class Uses(NamedTuple):
    """Hashes of units that a request has used, the most valuable first.

    num_before: other units that count as used later than all of these
    """

    hashes: Sequence[bytes]
    num_before: int = 0


class UnitKind(Protocol):
    """The units of one kind, as the disk sees them."""

    @property
    def name(self) -> str:
        """Name of the kind, by which the runner and the disk know it."""

    @property
    def reclaimer(self) -> Reclaimer | None:
        """Its pages, to share their memory with other kinds; None if its units are not pages."""

    def has(self, hash_: bytes, /) -> bool:
        """Return True if the unit with this hash is in memory."""

    def unit_of(self, hash_: bytes, /) -> int:
        """Return the unit with this hash, which must be in memory."""

    def pinned(self) -> Iterable[bytes]:
        """Return the hashes of units that are never evicted, and are written to disk first."""

    def used_by(self, request: LiveRequest, /) -> Uses:
        """Return the units worth keeping of what the request has used."""

    def unsaved(self, request: LiveRequest, is_on_disk: Has, /) -> Units:
        """Return the units to write before the request releases its pages, which loses them."""


@runtime_checkable
class UnitEvents(Protocol):
    """Takes which units of a kind beside the full pages are in memory. Its methods return at once."""

    def unit_stored(self, kind: str, hash_: bytes, /) -> None:
        """The unit with this hash can be found now; `kind` is the name of its kind."""

    def unit_removed(self, kind: str, hash_: bytes, /) -> None:
        """The unit with this hash is in memory no longer."""

    def units_cleared(self, kind: str, /) -> None:
        """None of the kind's units is in memory: it begins anew."""


class Room:
    """How many requests a kind has units for, and how far they may run: unbounded unless overridden.

    `num_reserved`, in these methods, counts free units that waiting requests may not take.
    """

    def num_free(self) -> int:
        """Return the number of pages by which all tables together could grow."""
        return UNBOUNDED

    def num_own(self, request: LiveRequest) -> int:
        """Return the number of units that become free if the request releases its own."""
        return 0

    def can_grow(self, request: LiveRequest, num_pages: int) -> bool:
        """Return True if the request's units can cover `num_pages` pages."""
        return True

    def max_pages(self, request: LiveRequest) -> int:
        """Return the number of pages that the table of a running prompt may cover."""
        return UNBOUNDED

    def max_block(self) -> int:
        """Return the most rows of an image that one chunk is certain to have room for."""
        return UNBOUNDED

    # ---- waiting requests

    def num_reserved(self, running: Iterable[LiveRequest]) -> int:
        """Return the number of free units that the prompts of these running requests still need."""
        return 0

    def num_lacking(self, request: LiveRequest, num_cached: int, num_reserved: int) -> int:
        """Return how many units the request lacks; 0 or less if there are enough."""
        return 0

    def num_growable_from(self, request: LiveRequest, num_cached: int, num_reserved: int) -> int:
        """Return the pages by which the request may grow if it begins after `num_cached` pages."""
        return UNBOUNDED

    def can_read(self, num_reserved: int) -> bool:
        """Return True if there is room for the units read from disk at the end of a prefix."""
        return True


class EndKind(ABC):
    """A kind that limits how much of a cached prefix can be used, and how far requests run.

    The defaults are those of a kind that has room for every request and nothing on disk. `room` counts
    the units that requests may have.
    """

    name: str
    # Reason of a miss where the pages are cached, but this kind cannot continue from them.
    missing: CacheMiss
    pool: PagePool | None = None  # if its units are pages
    room: Room = Room()
    reclaimer: Reclaimer | None = None  # its pages, if they share memory with other kinds
    names_units = False  # `plan` and `load` name its units, and `pop_dropped` returns these names
    has_table = False  # chunks carry the request's `window_table`
    # A request that reads from disk holds the units that it finds in memory; else it reads these, too.
    holds_found = False

    @abstractmethod
    def renewed(self, pool: PagePool) -> Self:
        """Return an empty kind of the same size, beside `pool` of full pages."""

    @abstractmethod
    def has(self, hash_: bytes) -> bool:
        """Return True if the unit with this hash is in memory."""

    @abstractmethod
    def unit_of(self, hash_: bytes) -> int:
        """Return the unit with this hash, which must be in memory."""

    # ---- prefix hits

    @abstractmethod
    def num_usable(self, hashes: Sequence[bytes], num_pages: int, has: Has | None = None) -> int:
        """Return how many of the first `num_pages` cached pages a sequence can continue after.

        has: tells if a unit is available; by default, if it is in memory
        """

    # ---- lifecycle of a request

    def begin(self, request: LiveRequest, start: Start) -> None:
        """Start a request at the end of its cached pages."""

    def begin_again(self, request: LiveRequest, num_pages: int) -> None:
        """Start over after `num_pages` pages in memory, because a read from disk failed."""

    def grow(self, request: LiveRequest, num_pages: int) -> None:
        """Allocate units so that the request covers `num_pages` pages."""

    def publish(self, request: LiveRequest, first: int, end: int, parent: bytes) -> None:
        """Make units of pages first .. end findable; `parent` is the hash of the page before them."""

    def pass_by(self, request: LiveRequest, position: int) -> None:
        """Release what no row from `position` on needs; all rows before it are computed and read."""

    def expect(self, request: LiveRequest, num_pages: int) -> None:
        """A follower will continue after the first `num_pages` pages of the running request."""

    def stop(self, request: LiveRequest) -> None:
        """Stop a request, whose units unread steps may still use."""

    def release(self, request: LiveRequest) -> None:
        """Release its units, which no unread step uses."""

    # ---- steps

    def take_draft(self, request: LiveRequest, num_tokens: int) -> int:
        """Take units for the rows of a draft in the next plan; return for how many of its tokens."""
        return num_tokens

    def plan(self, chunks: list[Chunk]) -> list[Chunk]:
        """Return the chunks of a step with their plans for this kind."""
        return chunks

    def commit(self, chunk: Chunk) -> None:
        """Commit a chunk that has been computed."""

    def pop_dropped(self) -> list[int]:
        """Return the names of units that can be dropped once the last planned step is launched."""
        return []

    def ids(self) -> set[int]:
        """Return the names of all units that were planned, and not returned by `pop_dropped`."""
        return set()

    # ---- the disk

    def pinned(self) -> Iterable[bytes]:
        """Return the hashes of units that are written to disk first."""
        return ()

    def used_by(self, request: LiveRequest) -> Uses:
        """Return the units worth keeping of what the request has used."""
        return Uses(())

    def unsaved(self, request: LiveRequest, is_on_disk: Has) -> Units:
        """Return the units to write before the request releases its pages, which loses them."""
        return ()

    def num_to_read(self, hashes: Sequence[bytes], num_pages: int) -> int:
        """Return the number of units to read so that a request can continue after `num_pages` pages."""
        return 0

    def load(self, request: LiveRequest, end: int) -> Units:
        """Return the units to read so that the request can continue after page `end`."""
        return ()

    def loaded(self, request: LiveRequest, units: Units, parent: Callable[[int], bytes]) -> None:
        """Take the units that were read; the request has `num_computed` tokens.

        parent: returns the hash of the page before the one with this index
        """

    # ---- protection from eviction

    def pin(self, prefix: LiveRequest) -> None:
        """Protect the units that continue a computed named prefix."""

    def unpin(self, prefix_id: str) -> None:
        """End the protection of a named prefix; no-op if there is none with this id."""

    def keep(self, hashes: Sequence[bytes], until: float) -> None:
        """Protect the units that continue a prefix with these hashes, until a time in seconds."""

    def expire(self, now: float) -> None:
        """End protections that have expired at `now`, in seconds."""

    def forget(self, hashes: Iterable[bytes]) -> None:
        """Drop the units with these hashes that no request holds."""

    def reset(self) -> None:
        """Drop all units but those of named prefixes; the pages were reset before."""

    def check(self, running: Sequence[LiveRequest], holders: Sequence[LiveRequest]) -> None:
        """Audit the invariants. Raises AssertionError.

        holders: requests whose pages are not released, including the running ones
        """


def num_usable(
    ends: Sequence[EndKind],
    hashes: Sequence[bytes],
    num_pages: int,
    has: Callable[[EndKind], Has] | None = None,
) -> int:
    """Return how many of the first `num_pages` cached pages every kind can continue after."""
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

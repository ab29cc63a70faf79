"""DiskCache: the disk and the page store as the scheduler sees them, and the decision whether reading pays.

    read:     bytes of the pages / measured bytes per second
    compute:  tokens * measured seconds of a prompt's token

Both are measured while the engine runs. Until then reading is assumed to pay: the first load is the
measurement, and one that takes too long is given up.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from mlxserve.cache.kinds.kind import Uses
from mlxserve.disk.loads import DiskAnswer
from mlxserve.disk.rank_tier import RankDisks
from mlxserve.disk.tier import DiskTier, Tier
from mlxserve.disk.tiers import Tiers
from mlxserve.disk.unwritten import Unwritten
from mlxserve.engine.step_time_model import StepTimeModel

_MIN_SECONDS = 0.5  # to wait for a read that is not longer than computing the pages
_UNMEASURED_SECONDS = 5.0  # the same while it is unknown how long computing takes
_STEP_SECONDS = 1e-6  # by which a page counts as used before the one that it follows


# Of each kind's records, by its name.
SUFFIXES = {"pages": b"", "windows": b"w", "states": b"s"}


@dataclass(frozen=True, slots=True)
class RecordKind:
    """The records of one kind of units.

    name: of the kind
    unit_bytes: size of a record's payload
    max_at_once: maximum units to write at once
    """

    name: str
    unit_bytes: int
    max_at_once: int = 256

    @property
    def suffix(self) -> bytes:
        """Return the suffix that makes a record's name of the hash of a page."""
        return SUFFIXES[self.name]

    def record(self, hash_: bytes) -> bytes:
        """The record's name for the unit with this hash."""
        return hash_ + self.suffix


def page_records(unit_bytes: int) -> RecordKind:
    return RecordKind("pages", unit_bytes)


def window_records(unit_bytes: int) -> RecordKind:
    return RecordKind("windows", unit_bytes)


def state_records(unit_bytes: int) -> RecordKind:
    # Each may be as large as a hundred pages, and a full disk keeps the newest of them only.
    return RecordKind("states", unit_bytes, max_at_once=2)


class DiskCache:
    """The units of one model on disk, with the times to read and to compute them."""

    def __init__(
        self,
        disk: DiskTier | None,
        pace: StepTimeModel,
        kinds: Sequence[RecordKind],
        *,
        page_size: int,
        store: Tier | None = None,
        others: RankDisks | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Keep units on disk, in a store that other servers share, or in both.

        kinds: full pages of `page_size` tokens first, then the other kinds
        others: disks of other ranks, which have their parts of each unit
        clock: seconds since 1970
        """
        assert disk is not None or store is not None, "units are kept somewhere"
        self.disk = disk
        self.store = store
        self.tier = _together(disk, store)
        self._others = others
        self._pace = pace
        self.kinds = {kind.name: kind for kind in kinds}
        self._page_size = page_size
        self._clock = clock
        # By kind, of each tier.
        self._unwritten = {
            kind.name: [
                Unwritten(tier, kind.unit_bytes) for tier in (disk, store) if tier is not None
            ]
            for kind in kinds
        }
        # Tickets of loads that were given up and are not answered yet.
        self._overdue: set[int] = set()

    def use(self, uses: Mapping[str, Uses], /) -> None:
        """Record that a request has just used these units, by kind."""
        # One time for all kinds, so that their units can be compared.
        now = self._clock()
        for kind, (hashes, num_before) in uses.items():
            record = self.kinds[kind].record
            used = {
                record(hash_): now - (num_before + number) * _STEP_SECONDS
                for number, hash_ in enumerate(hashes)
            }
            for unwritten in self._unwritten[kind]:
                unwritten.use(dict(reversed(used.items())))
            self.tier.touch(used)

    def unwritten(self, kind: str, /) -> Iterator[bytes]:
        """Units that a tier lacks and would keep, most recently used first; those of the store last."""
        num_suffix = len(self.kinds[kind].suffix)
        names = chain.from_iterable(self._open(kind))
        return (name[: len(name) - num_suffix] for name in names)

    def is_unwritten(self, kind: str, hash_: bytes, /) -> bool:
        """True if a tier lacks a unit and would keep it."""
        record = self.kinds[kind].record(hash_)
        return any(record in unwritten for unwritten in self._open(kind))

    def _open(self, kind: str) -> list[Unwritten]:
        """Return what is unwritten in the tiers; of several, in those that accept records now."""
        each = self._unwritten[kind]
        return each if len(each) == 1 else [one for one in each if one.tier.accepts]

    def forget(self, kind: str, hashes: Iterable[bytes], /) -> None:
        """Remove units that are no longer in memory."""
        names = list(map(self.kinds[kind].record, hashes))
        for unwritten in self._unwritten[kind]:
            unwritten.forget(names)

    def delete(self, hashes: Iterable[bytes]) -> int:
        """Delete the units with these hashes; return how many full pages were on disk."""
        hashes = list(hashes)
        num_deleted = []
        for kind in self.kinds.values():
            self.forget(kind.name, hashes)
            num_deleted.append(self.tier.delete(list(map(kind.record, hashes))))
        return num_deleted[0]

    def save(self, kind: str, units: Sequence[tuple[bytes, int]], payloads: Sequence[bytes]) -> int:
        """Save (hash, unit) with `DiskTier.save`, passing the time of each one's last use."""
        names = [self.kinds[kind].record(hash_) for hash_, _ in units]
        if self._others is not None:
            self._others.stage(kind, names, [unit for _, unit in units])
        now, kinds = self._clock(), list(chain.from_iterable(self._unwritten.values()))
        times = [
            next((time for kind in kinds if (time := kind.time(name)) is not None), now)
            for name in names
        ]
        return self.tier.save(list(zip(names, payloads, strict=True)), times)

    def writing(self, kind: str, hashes: Sequence[bytes], units: Sequence[int]) -> None:
        """Loaded units are about to be written into memory; other ranks do the same with theirs."""
        if self._others is not None:
            self._others.write(kind, list(map(self.kinds[kind].record, hashes)), units)

    def num_leading(self, hashes: Sequence[bytes], /) -> int:
        """Number of leading pages that are on disk, or in the store while reading from it pays."""
        if isinstance(self.tier, Tiers):
            self.tier.is_store_used = self.store_pays()
        return self.tier.num_leading(hashes)

    def has(self, kind: str, hash_: bytes, /) -> bool:
        """True if the unit of this kind with this hash is on disk."""
        return self.kinds[kind].record(hash_) in self.tier

    def pays(self, num_tokens: int, num_units: Mapping[str, int], /) -> bool:
        """True if reading `num_units` of each kind is probably faster than computing `num_tokens`.

        False while a tier has not answered a load that was given up.
        """
        if self._overdue:
            return False
        rate = self._read_rate()
        seconds = self._pace.prompt_seconds(num_tokens)
        if not rate or seconds is None:
            return True
        num_bytes = sum(count * self.kinds[kind].unit_bytes for kind, count in num_units.items())
        return num_bytes / rate < seconds

    def _read_rate(self) -> float:
        """Bytes per second of the slowest tier that is read from; 0 while one is not measured."""
        tiers: list[Tier] = [] if self.disk is None else [self.disk]
        if isinstance(self.tier, Tiers) and self.tier.is_store_used and self.store is not None:
            tiers.append(self.store)
        return min((tier.use().read_rate for tier in tiers), default=0.0)

    def store_pays(self) -> bool:
        """True if a page is probably read from the store faster than it is computed."""
        assert self.store is not None, "there is a store"
        rate = self.store.use().read_rate
        seconds = self._pace.prompt_seconds(self._page_size)
        if not rate or seconds is None:
            return True
        return next(iter(self.kinds.values())).unit_bytes / rate < seconds

    def patience(self, num_pages: int) -> float:
        """Seconds to wait for a read of `num_pages` before computing them instead."""
        seconds = self._pace.prompt_seconds(num_pages * self._page_size)
        return _UNMEASURED_SECONDS if seconds is None else max(_MIN_SECONDS, seconds)

    def give_up(self, ticket: int) -> None:
        """Stop waiting for this load."""
        self._overdue.add(ticket)

    def poll(self) -> list[DiskAnswer]:
        """Return the answers of `DiskTier.poll`."""
        answers = self.tier.poll()
        self._overdue.difference_update(answer.ticket for answer in answers)
        return answers


def _together(disk: DiskTier | None, store: Tier | None) -> DiskTier | Tiers:
    """The tiers as one."""
    if store is not None:
        return Tiers(disk, store)
    assert disk is not None, "there is one of them"
    return disk

"""Tiers: the disk and a page store as one tier. What both have is read from disk.

    load ──▶ names on disk ────────▶ DiskTier ──┐
        └──▶ names in the store ───▶ Tier ──────┴──▶ one answer: the leading records of both

Records are saved to both, each of which takes what it lacks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, takewhile

from mlxserve.disk.loads import DiskAnswer
from mlxserve.disk.tier import DiskTier, Tier

_SLICE_SECONDS = 0.005  # for which one of two tiers is waited for


@dataclass(slots=True)
class _Split:
    """A load whose records are in several tiers.

    places: for each name, the tier that reads it
    answers: of the tiers that have answered
    """

    places: tuple[int, ...]
    num_tiers: int
    answers: dict[int, tuple[bytes, ...]] = field(default_factory=dict)


class Tiers:
    """The disk, if there is one, before a store. Not thread-safe, as `Tier`."""

    def __init__(self, disk: DiskTier | None, store: Tier) -> None:
        self.each: tuple[Tier, ...] = (store,) if disk is None else (disk, store)
        self._store = store
        # May be False to leave the store out of what is found, while reading from it does not pay.
        self.is_store_used = True
        self._numbers = count()
        self._splits: dict[int, _Split] = {}
        # Tickets of the tiers, by tier and its own ticket.
        self._tickets: dict[tuple[int, int], int] = {}

    def __contains__(self, name: bytes) -> bool:
        """True if this record is known to exist."""
        return self._place(name) is not None

    def _place(self, name: bytes) -> int | None:
        for number, tier in enumerate(self.each):
            if name in tier and (tier is not self._store or self.is_store_used):
                return number
        return None

    def num_leading(self, names: Sequence[bytes], /) -> int:
        """Number of leading names whose records exist."""
        return sum(1 for _ in takewhile(self.__contains__, names))

    def save(
        self, records: Sequence[tuple[bytes, bytes]], used: Sequence[float] | None = None
    ) -> int:
        """Save to all tiers; return how many leading records all that take any have accepted."""
        taken = [tier.save(records, used) for tier in self.each if tier.accepts]
        return min(taken, default=0)

    def touch(self, used: Mapping[bytes, float]) -> None:
        """Update last-used times; unknown records are ignored."""
        for tier in self.each:
            tier.touch(used)

    def load(self, names: Sequence[bytes]) -> int:
        """Start reading these records; return a ticket, by which `poll` returns them."""
        ticket = next(self._numbers)
        last = len(self.each) - 1
        found = [self._place(name) for name in names]
        # One that vanished meanwhile is asked of the last tier, which ends the answer there.
        places = tuple(last if place is None else place for place in found)
        asked = sorted(set(places)) or [last]
        self._splits[ticket] = _Split(places, len(asked))
        for number in asked:
            own = [name for name, place in zip(names, places, strict=True) if place == number]
            self._tickets[number, self.each[number].load(own)] = ticket
        return ticket

    def poll(self) -> list[DiskAnswer]:
        """Return the answers since the last call, each once."""
        done = []
        for number, tier in enumerate(self.each):
            for answer in tier.poll():
                ticket = self._tickets.pop((number, answer.ticket))
                split = self._splits[ticket]
                split.answers[number] = answer.payloads
                if len(split.answers) == split.num_tiers:
                    done.append(self._join(ticket, self._splits.pop(ticket)))
        return done

    def _join(self, ticket: int, split: _Split) -> DiskAnswer:
        payloads, from_store = [], []
        rest = {number: iter(answer) for number, answer in split.answers.items()}
        for place in split.places:
            payload = next(rest[place], None)
            if payload is None:
                break
            payloads.append(payload)
            from_store.append(self.each[place] is self._store)
        return DiskAnswer(ticket, tuple(payloads), tuple(from_store))

    def wait(self, seconds: float) -> None:
        """Wait up to `seconds` until a tier has an answer."""
        pending = sorted({number for number, _ in self._tickets})
        if len(pending) == 1:
            self.each[pending[0]].wait(seconds)
            return
        for number in pending:
            self.each[number].wait(_SLICE_SECONDS)

    def delete(self, names: Sequence[bytes]) -> int:
        """Forget these records everywhere, and return how many there were where most were."""
        return max(tier.delete(names) for tier in self.each)

    def clear(self) -> None:
        """Forget this identity's records everywhere."""
        for tier in self.each:
            tier.clear()

    def close(self, seconds: float = 5.0) -> None:
        """Write accepted records for at most `seconds` in each tier, and end the threads. Idempotent."""
        for tier in self.each:
            tier.close(seconds)

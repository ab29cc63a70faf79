"""A tier whose records have a part on every rank, as rank 0 sees it.

    rank 0      RankDisks ── what to save, load, touch and delete ──▶ RankRecords of every other rank
                          ◀── what they have, and how much of a load they read ──

Each rank keeps its parts in a tier of its own. A record exists if every rank has its part, and a load returns
the leading records that all of them have read. What one rank has lost, or refused, is saved again by all.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from queue import Empty, SimpleQueue
from typing import Any

from mlxserve.disk.loads import DiskAnswer
from mlxserve.disk.rank_messages import News, RankMessage, Verb
from mlxserve.disk.tier import DiskTier, Listener, Tier

_REFUSED_SECONDS = 10.0  # for which nothing is saved after a rank has refused a record


class RankDisks:
    """Rank 0's connection to the tiers of all other ranks. All but `receive` is for the engine's thread."""

    def __init__(self, ranks: Collection[int], tell: Callable[[bytes], None]) -> None:
        """`tell`: sends the same to each of these ranks, in order with the steps that they compute."""
        self.ranks = tuple(ranks)
        self._tell = tell
        self._answers: SimpleQueue[tuple[int, int, News | tuple[int, int]]] = SimpleQueue()
        self._tiers: dict[int, RankTier] = {}
        # What the next saves read: their kind, and units by the names of records.
        self._kind, self._units = "", dict[bytes, int]()

    def add(self, tier: RankTier) -> None:
        """Begin to hand a tier what the other ranks tell of theirs."""
        self._tiers[tier.number] = tier

    def receive(self, rank: int, body: bytes) -> None:
        """Take a message that a rank has sent. For any thread. Raises ValueError for what is none."""
        message = RankMessage.decode(body)
        said: News | tuple[int, int]
        if message.verb is Verb.NEWS:
            said = News.from_message(message)
        elif message.verb is Verb.ANSWER:
            [count] = message.units
            said = message.number, count
        else:
            raise ValueError(f"rank {rank} does not send {message.verb.name}")
        if rank not in self.ranks or message.tier not in self._tiers:
            raise ValueError(f"rank {rank} tells of tier {message.tier}, which it does not have")
        self._answers.put((rank, message.tier, said))

    def say(self, message: RankMessage) -> None:
        """Send a message to every other rank."""
        self._tell(message.encode())

    def stage(self, kind: str, names: Sequence[bytes], units: Sequence[int]) -> None:
        """Say in which units the records are that are saved next."""
        self._kind, self._units = kind, dict(zip(names, units, strict=True))

    def save(self, tier: int, names: Sequence[bytes], used: Sequence[float]) -> None:
        """Have the other ranks save their parts of records, which were staged."""
        units = [self._units[name] for name in names]
        self.say(RankMessage(Verb.SAVE, tier, self._kind, units=units, times=used, names=names))

    def write(self, kind: str, names: Sequence[bytes], units: Sequence[int]) -> None:
        """Have the other ranks write their parts of loaded records into these units."""
        self.say(RankMessage(Verb.WRITE, kind=kind, units=units, names=names))

    def take_all(self) -> None:
        """Hand on what has been sent."""
        while not self._answers.empty():
            self._take(*self._answers.get())

    def wait(self, seconds: float) -> bool:
        """Wait for the next message, at most `seconds`, and hand it on; False if none came."""
        try:
            self._take(*self._answers.get(timeout=max(0.0, seconds)))
        except Empty:
            return False
        return True

    def _take(self, rank: int, tier: int, said: News | tuple[int, int]) -> None:
        if isinstance(said, News):
            self._tiers[tier].take_news(rank, said)
        else:
            self._tiers[tier].take_answer(rank, *said)


@dataclass(slots=True)
class _Part:
    """The tier of one other rank.

    names: of its records that can be read
    staged: names that it was told to save, and has not told of
    is_out: it can read none now
    refused_at: time of the last record that it refused
    """

    names: set[bytes] = field(default_factory=set)
    staged: set[bytes] = field(default_factory=set)
    num_messages: int = 0
    is_idle: bool = False
    is_out: bool = False
    refused_at: float = -inf
    coldest_kept: float = -inf

    def has(self, name: bytes) -> bool:
        return not self.is_out and (name in self.names or name in self.staged)

    def forget(self, names: Collection[bytes]) -> None:
        self.names.difference_update(names)
        self.staged.difference_update(names)


@dataclass(slots=True)
class _Join:
    """A load of all ranks.

    own: the records that rank 0 has read; None until it answers
    counts: how many leading ones the others have read, by rank
    """

    own: tuple[bytes, ...] | None = None
    counts: dict[int, int] = field(default_factory=dict)


class RankTier(Tier):
    """Rank 0's records, of which every other rank has a part as well."""

    def __init__(self, disks: RankDisks, number: int, *args: Any, **options: Any) -> None:
        """number: that of the tier in messages. The others are those of `Tier`."""
        self.number = number
        self._disks = disks
        self._parts = {rank: _Part() for rank in disks.ranks}
        self._joins: dict[int, _Join] = {}
        self._returned: list[int] = []  # loads that the last poll returned
        self._num_said = self._cleared_said = 0
        self._outer: Listener | None = None
        super().__init__(*args, **options)
        self._listener = self._changed
        disks.add(self)

    def report_to(self, listener: Listener) -> None:
        self._outer = listener

    def __contains__(self, name: bytes) -> bool:
        return super().__contains__(name) and all(part.has(name) for part in self._parts.values())

    def is_written(self, name: bytes) -> bool:
        return super().is_written(name) and self._is_whole(name)

    @property
    def is_idle(self) -> bool:
        return super().is_idle and all(
            part.is_idle and part.num_messages == self._num_said for part in self._parts.values()
        )

    @property
    def accepts(self) -> bool:
        return super().accepts and not self._is_refused()

    def coldest_kept(self, num_bytes: int) -> float:
        return max(
            super().coldest_kept(num_bytes), *(part.coldest_kept for part in self._parts.values())
        )

    def save(
        self, records: Sequence[tuple[bytes, bytes]], used: Sequence[float] | None = None
    ) -> int:
        self._take_all()
        if self._is_refused():
            return 0
        used = used or [time.time()] * len(records)
        num_taken = super().save(records, used)
        if num_taken:
            names = [name for name, _ in records[:num_taken]]
            self._disks.save(self.number, names, used[:num_taken])
            self._num_said += 1
            for part in self._parts.values():
                part.staged.update(name for name in names if name not in part.names)
        return num_taken

    def touch(self, used: Mapping[bytes, float]) -> None:
        super().touch(used)
        if known := self._names & used.keys():
            names = tuple(known)
            times = [used[name] for name in names]
            self._say(RankMessage(Verb.TOUCH, self.number, times=times, names=names))

    def load(self, names: Sequence[bytes]) -> int:
        ticket = super().load(names)
        self._joins[ticket] = _Join()
        self._say(RankMessage(Verb.LOAD, self.number, number=ticket, names=names))
        return ticket

    def poll(self) -> list[DiskAnswer]:
        if self._returned:
            self._say(RankMessage(Verb.RELEASE, self.number, units=self._returned))
            self._returned = []
        for answer in super().poll():
            self._joins[answer.ticket].own = answer.payloads
        done = [
            (ticket, join.own[: min(join.counts.values(), default=len(join.own))])
            for ticket, join in self._joins.items()
            # What rank 0 cannot read is not waited for.
            if join.own is not None and (not join.own or len(join.counts) == len(self._parts))
        ]
        for ticket, _ in done:
            del self._joins[ticket]
            self._returned.append(ticket)
        return [DiskAnswer(ticket, payloads) for ticket, payloads in done]

    def wait(self, seconds: float) -> None:
        if any(join.own is None for join in self._joins.values()):
            super().wait(seconds)
        elif self._joins:
            self._disks.wait(seconds)

    def flush(self, seconds: float) -> bool:
        end = time.monotonic() + seconds
        super().flush(seconds)
        while not self.is_idle:
            if not self._disks.wait(end - time.monotonic()):
                return False
        return True

    def delete(self, names: Sequence[bytes]) -> int:
        num_there = super().delete(names)
        self._say(RankMessage(Verb.DELETE, self.number, names=names))
        for part in self._parts.values():
            part.forget(names)
        return num_there

    def clear(self) -> None:
        super().clear()
        self._say(RankMessage(Verb.CLEAR, self.number))
        self._cleared_said = self._num_said
        for part in self._parts.values():
            part.names.clear()
            part.staged.clear()

    def take_answer(self, rank: int, ticket: int, count: int) -> None:
        """Take how many leading records of a load another rank has read."""
        # One that was answered without it is gone.
        if (join := self._joins.get(ticket)) is not None:
            join.counts[rank] = max(0, count)

    def take_news(self, rank: int, news: News) -> None:
        """Take what has changed in another rank's part."""
        part = self._parts[rank]
        part.num_messages, part.is_idle = news.num_messages, news.is_idle
        part.is_out, part.coldest_kept = news.is_out, news.coldest_kept
        if news.num_messages < self._cleared_said:
            return
        part.forget(news.gone)
        part.staged.difference_update(news.written)
        part.names.update(news.written)
        if news.has_refused:
            part.refused_at = self._clock()
        self._report((*news.written, *news.gone))

    def _say(self, message: RankMessage) -> None:
        self._disks.say(message)
        self._num_said += 1

    def _take_all(self) -> None:
        super()._take_all()
        self._disks.take_all()

    def _is_whole(self, name: bytes) -> bool:
        return all(not part.is_out and name in part.names for part in self._parts.values())

    def _is_refused(self) -> bool:
        now = self._clock()
        return any(now - part.refused_at < _REFUSED_SECONDS for part in self._parts.values())

    def _changed(self, changes: Mapping[bytes, bool]) -> None:
        """Report what has changed in rank 0's own tier."""
        self._report(changes)

    def _report(self, names: Collection[bytes]) -> None:
        if self._outer is not None and names:
            self._outer({name: name in self._names and self._is_whole(name) for name in names})


class RankDiskTier(RankTier, DiskTier):
    """Keeps rank 0's parts in files; it takes the arguments of `DiskTier`."""

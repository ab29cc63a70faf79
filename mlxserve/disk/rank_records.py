"""RankRecords: another rank's parts of the records that rank 0 plans with.

    messages of rank 0 ──▶ take ──▶ the tiers of this rank, and its units in memory
    the tiers' threads ──▶ notify ──▶ report ──▶ answers and news to rank 0

Knows neither arrays nor connections. All methods but `notify` are for the thread that computes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from mlxserve.disk.rank_messages import News, RankMessage, Verb
from mlxserve.disk.tier import Tier


class Memory(Protocol):
    """This rank's units in memory."""

    def read(self, kind: str, units: Sequence[int], /) -> list[bytes]:
        """Return the content of units, once all steps so far are computed."""

    def write(self, kind: str, units: Sequence[int], payloads: Sequence[bytes], /) -> None:
        """Write what `read` returned."""


class Wakeups:
    """Has `RankRecords.report` called on the thread that computes, once for many events."""

    def __init__(self, call_soon: Callable[[Callable[[], None]], None]) -> None:
        """call_soon: calls a function on that thread, from any thread."""
        self._call_soon = call_soon
        self._report: Callable[[], None] | None = None
        self._is_due = False

    def begin(self, report: Callable[[], None]) -> None:
        """Call `report` now, and after each further event."""
        self._report = report
        self._run()

    def notify(self) -> None:
        """Take an event. For any thread."""
        if not self._is_due:
            self._is_due = True
            self._call_soon(self._run)

    def _run(self) -> None:
        # Before the report, which may miss what comes while it runs.
        self._is_due = False
        if self._report is not None:
            self._report()


class _Part:
    """One tier of this rank, and what rank 0 knows of it.

    loads: what was read for each load of rank 0 that may still be written, by the names of records
    """

    def __init__(self, tier: Tier, max_bytes: int) -> None:
        self.tier = tier
        self.num_messages = 0
        self.loads: dict[int, dict[bytes, bytes]] = {}
        self._max_bytes = max_bytes
        self._names: dict[int, tuple[int, tuple[bytes, ...]]] = {}  # by this tier's own tickets
        self._changes = dict.fromkeys(tier.names, True)
        self._staged: dict[bytes, None] = {}  # names to save, of which nothing is known yet
        self._told: tuple[int, bool, bool] | None = None  # the state that rank 0 knows
        tier.report_to(self._follow)

    def _follow(self, changes: Mapping[bytes, bool]) -> None:
        self._changes.update(changes)

    def save(
        self,
        names: Sequence[bytes],
        used: Sequence[float],
        read: Callable[[list[int]], list[bytes]],
    ) -> None:
        """Save records, of which `read` returns the payloads by their places in `names`."""
        self._staged.update(dict.fromkeys(names))
        if lacking := [place for place, name in enumerate(names) if name not in self.tier]:
            payloads = read(lacking)
            records = [(names[place], data) for place, data in zip(lacking, payloads, strict=True)]
            self.tier.save(records, [used[place] for place in lacking])

    def load(self, number: int, names: tuple[bytes, ...]) -> None:
        self.loads[number] = {}
        self._names[self.tier.load(names)] = number, names

    def delete(self, names: Sequence[bytes]) -> None:
        for name in names:
            self._staged.pop(name, None)
        self.tier.delete(names)

    def clear(self) -> None:
        self._staged.clear()
        self.tier.clear()

    def answers(self) -> list[tuple[int, int]]:
        """Keep what has been read, and return (load of rank 0, number of records) for each."""
        answered = []
        for answer in self.tier.poll():
            number, names = self._names.pop(answer.ticket)
            if number in self.loads:
                self.loads[number] = dict(zip(names, answer.payloads, strict=False))
                answered.append((number, len(answer.payloads)))
        return answered

    def news(self) -> News | None:
        """Return what rank 0 does not know yet; None if that is nothing."""
        state = self.num_messages, self.tier.is_idle, self.tier.is_out
        changes, self._changes = self._changes, {}
        # One that is neither written nor waits to be was refused, or dropped for warmer ones.
        refused = []
        for name in tuple(self._staged):
            if self.tier.is_written(name):
                changes[name] = True
                del self._staged[name]
            elif name not in self.tier:
                refused.append(name)
                del self._staged[name]
        if not changes and not refused and state == self._told:
            return None
        self._told = state
        written = [name for name, is_there in changes.items() if is_there]
        gone = [name for name, is_there in changes.items() if not is_there]
        coldest_kept = self.tier.coldest_kept(self._max_bytes)
        return News(
            self.num_messages,
            written,
            [*gone, *refused],
            is_idle=state[1],
            is_out=state[2],
            has_refused=bool(refused),
            coldest_kept=coldest_kept,
        )


class RankRecords:
    """The tiers of one rank, which does what rank 0 says."""

    def __init__(
        self,
        tiers: Mapping[int, Tier],
        memory: Memory,
        send: Callable[[bytes], None],
        wakeups: Wakeups,
        *,
        max_bytes: int,
    ) -> None:
        """Take the tiers, and tell rank 0 of them.

        tiers: by their numbers in messages
        send: sends a message to rank 0
        wakeups: what the tiers notify
        max_bytes: size of the largest record
        """
        self._parts = {number: _Part(tier, max_bytes) for number, tier in tiers.items()}
        self._memory = memory
        self._send = send
        wakeups.begin(self.report)

    def take(self, body: bytes) -> None:
        """Do what a message of rank 0 says. Raises ValueError for what is none."""
        message = RankMessage.decode(body)
        if message.verb is Verb.WRITE:
            self._write(message)
            return
        part = self._parts[message.tier]
        part.num_messages += 1
        match message.verb:
            case Verb.SAVE:
                part.save(message.names, message.times, lambda places: self._read(message, places))
            case Verb.LOAD:
                part.load(message.number, tuple(message.names))
            case Verb.RELEASE:
                for number in message.units:
                    part.loads.pop(number, None)
            case Verb.TOUCH:
                part.tier.touch(dict(zip(message.names, message.times, strict=True)))
            case Verb.DELETE:
                part.delete(message.names)
            case Verb.CLEAR:
                part.clear()
            case _:
                raise ValueError(f"rank 0 does not send {message.verb.name}")
        self.report()

    def report(self) -> None:
        """Send rank 0 what it does not know yet."""
        for number, part in self._parts.items():
            for load, count in part.answers():
                answer = RankMessage(Verb.ANSWER, number, number=load, units=(count,))
                self._send(answer.encode())
            if (news := part.news()) is not None:
                self._send(news.message(number).encode())

    def close(self, seconds: float) -> None:
        """Write accepted records for at most `seconds` in each tier. Idempotent."""
        for part in self._parts.values():
            part.tier.close(seconds)

    def _read(self, message: RankMessage, places: Sequence[int]) -> list[bytes]:
        return self._memory.read(message.kind, [message.units[place] for place in places])

    def _write(self, message: RankMessage) -> None:
        payloads = [self._loaded(name) for name in message.names]
        self._memory.write(message.kind, message.units, payloads)

    def _loaded(self, name: bytes) -> bytes:
        """Return a loaded record's payload; any load's is the same."""
        for part in self._parts.values():
            for payloads in part.loads.values():
                if (payload := payloads.get(name)) is not None:
                    return payload
        raise AssertionError("rank 0 writes a record that this rank has not read")

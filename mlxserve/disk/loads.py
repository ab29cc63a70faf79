"""DiskLoads: which records are to be read, and the answers that nobody has fetched yet.

    add ──▶ pop ──▶ answer ──▶ poll         each load is answered once
     └──────┴──── answer_all ───▲           with nothing, when the disk is given up

Touches no disk and has no lock: `DiskTier` calls it under its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

_WEIGHT = 0.3  # of the newest read in the average rate


@dataclass(frozen=True, slots=True)
class DiskAnswer:
    """To a load: the leading records that were read sound."""

    ticket: int
    payloads: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class DiskLoad:
    """Records to be read, one after another until one is missing."""

    ticket: int
    names: tuple[bytes, ...]


class DiskLoads:
    """Loads by their tickets, and what was read so far."""

    def __init__(self) -> None:
        self._loads: deque[DiskLoad] = deque()
        self._answers: deque[DiskAnswer] = deque()
        self._tickets: set[int] = set()  # of loads that were not answered yet
        self._next_ticket = 0
        self.num_read = 0
        self.bytes_read = 0  # of records that came from files
        self.read_rate = 0.0  # bytes per second of recent reads; 0 before the first

    @property
    def are_waiting(self) -> bool:
        """Whether one was not answered yet."""
        return bool(self._tickets)

    @property
    def has_answers(self) -> bool:
        return bool(self._answers)

    def add(self, names: Sequence[bytes]) -> int:
        """A load to be read; its ticket."""
        ticket = self._ticket()
        self._tickets.add(ticket)
        self._loads.append(DiskLoad(ticket, tuple(names)))
        return ticket

    def refuse(self) -> int:
        """A load that is answered with nothing at once; its ticket."""
        ticket = self._ticket()
        self._answers.append(DiskAnswer(ticket, ()))
        return ticket

    def pop(self) -> DiskLoad | None:
        """The next one to read."""
        return self._loads.popleft() if self._loads else None

    def pop_all(self) -> list[DiskLoad]:
        loads = list(self._loads)
        self._loads.clear()
        return loads

    def is_waiting(self, load: DiskLoad) -> bool:
        """False if it was answered with nothing while it was read."""
        return load.ticket in self._tickets

    def answer(
        self, load: DiskLoad, payloads: Sequence[bytes], *, num_bytes: int, seconds: float
    ) -> None:
        """`num_bytes` were read from files, in `seconds`; who no longer waits gets no answer."""
        self.num_read += len(payloads)
        self.bytes_read += num_bytes
        if num_bytes:
            rate = num_bytes / max(seconds, 1e-9)
            old = self.read_rate or rate
            self.read_rate = old + _WEIGHT * (rate - old)
        if self.is_waiting(load):
            self._tickets.remove(load.ticket)
            self._answers.append(DiskAnswer(load.ticket, tuple(payloads)))

    def answer_all(self) -> None:
        """Answer every load with nothing."""
        self._answers += [DiskAnswer(ticket, ()) for ticket in sorted(self._tickets)]
        self._tickets.clear()
        self._loads.clear()

    def poll(self) -> list[DiskAnswer]:
        """The answers since the last call, each once."""
        answers = list(self._answers)
        self._answers.clear()
        return answers

    def _ticket(self) -> int:
        ticket, self._next_ticket = self._next_ticket, self._next_ticket + 1
        return ticket

"""DiskLoads: the loads that the caller waits for, and the answers that it has not taken yet.

add ──▶ answer ──▶ poll         each load is answered once
 └─── answer_all ───▲           with nothing, when the disk is given up
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count


@dataclass(frozen=True, slots=True)
class DiskLoad:
    """Records to be read, one after another until one is missing."""

    ticket: int
    names: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class DiskAnswer:
    """To a load: the leading records that were read sound."""

    ticket: int
    payloads: tuple[bytes, ...]


class DiskLoads:
    """Loads by their tickets."""

    def __init__(self) -> None:
        self._answers: list[DiskAnswer] = []
        self._tickets: set[int] = set()  # of loads that were not answered yet
        self._numbers = count()

    @property
    def has_answers(self) -> bool:
        return bool(self._answers)

    def add(self, names: Sequence[bytes]) -> DiskLoad:
        """A load that is to be answered."""
        load = DiskLoad(next(self._numbers), tuple(names))
        self._tickets.add(load.ticket)
        return load

    def refuse(self) -> int:
        """The ticket of a load that is answered with nothing at once."""
        ticket = next(self._numbers)
        self._answers.append(DiskAnswer(ticket, ()))
        return ticket

    def answer(self, answer: DiskAnswer) -> None:
        """Keep an answer until `poll`, if its load still waits for one."""
        if answer.ticket in self._tickets:
            self._tickets.remove(answer.ticket)
            self._answers.append(answer)

    def answer_all(self) -> None:
        """Answer every load with nothing."""
        self._answers += [DiskAnswer(ticket, ()) for ticket in sorted(self._tickets)]
        self._tickets.clear()

    def poll(self) -> list[DiskAnswer]:
        """The answers since the last call, each once."""
        answers, self._answers = self._answers, []
        return answers

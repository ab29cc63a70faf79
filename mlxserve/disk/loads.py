"""DiskLoads: pending loads, and their answers until the caller takes them.

add ──▶ answer ──▶ poll         each load is answered once
 └─── answer_all ───▲           with no records, when the disk is given up
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
    """The answer to a load: the leading records that were read and verified.

    from_store: True for each that came from a page store; empty if there is none
    """

    ticket: int
    payloads: tuple[bytes, ...]
    from_store: tuple[bool, ...] = ()


class DiskLoads:
    """Loads by their tickets."""

    def __init__(self) -> None:
        self._answers: list[DiskAnswer] = []
        self._tickets: set[int] = set()  # pending loads
        self._numbers = count()

    @property
    def has_answers(self) -> bool:
        return bool(self._answers)

    def add(self, names: Sequence[bytes]) -> DiskLoad:
        """Create a load to be answered."""
        load = DiskLoad(next(self._numbers), tuple(names))
        self._tickets.add(load.ticket)
        return load

    def refuse(self) -> int:
        """Return the ticket of a load that is answered at once with no records."""
        ticket = next(self._numbers)
        self._answers.append(DiskAnswer(ticket, ()))
        return ticket

    def answer(self, answer: DiskAnswer) -> None:
        """Keep an answer until `poll`, if its load is still pending."""
        if answer.ticket in self._tickets:
            self._tickets.remove(answer.ticket)
            self._answers.append(answer)

    def answer_all(self) -> None:
        """Answer every load with no records."""
        self._answers += [DiskAnswer(ticket, ()) for ticket in sorted(self._tickets)]
        self._tickets.clear()

    def poll(self) -> list[DiskAnswer]:
        """The answers since the last call, each once."""
        answers, self._answers = self._answers, []
        return answers

"""Finding: one line of the doctor's report."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Grade(StrEnum):
    OK = "ok"
    SLOW = "slow"
    BROKEN = "BROKEN"
    FACT = ""  # not judged


@dataclass(frozen=True, slots=True)
class Finding:
    """A checked property, its value, and its grade."""

    name: str
    value: str
    grade: Grade = Grade.FACT

    @property
    def is_broken(self) -> bool:
        return self.grade is Grade.BROKEN

    def __str__(self) -> str:
        return f"{self.grade:<7}{self.name:<16}{self.value}"

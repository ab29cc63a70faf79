"""Hosts of matchers that answer what no host does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any


class Silent:
    """Answers no row."""

    def __init__(self, *_arguments: Any) -> None:
        pass

    def follow(self, rows: Sequence[Any], *_: Any) -> Iterator[list[object]]:
        for _ in rows[:0]:
            yield []


class Raises(Silent):
    def follow(self, rows: Sequence[Any], *_: Any) -> Iterator[list[object]]:
        raise LookupError(rows)


class Lies(Silent):
    """Masks of the wrong size."""

    def follow(self, rows: Sequence[Any], *_: Any) -> Iterator[list[object]]:
        for row in rows:
            yield [row[0], 0, b"\xff" * 7, 0.0]


class Forces(Silent):
    """A forced token that is none."""

    def follow(self, rows: Sequence[Any], *_: Any) -> Iterator[list[object]]:
        for row in rows:
            yield [row[0], 0, b"\xff" * 264 * 2, 0.0, -1]


class Slow(Silent):
    """Allows all, and says that each mask of the source "slow" takes a second."""

    def follow(self, rows: Sequence[Any], *_: Any) -> Iterator[list[object]]:
        for number, (_, source), *_ in rows:
            yield [number, 0, b"\xff" * 264, 1.0 if source == "slow" else 0.001]

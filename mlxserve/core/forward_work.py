"""Multiply-adds of a model's forward, by the positions of its rows, and how many a step may have.

    row at position p = weights + 2 * heads * head_dim * (positions it sees), over all layers

macOS ends a Metal command buffer that runs for some seconds, and a single kernel cannot be split: at
64K positions a row of an 8B model costs four times as much as at the first.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ForwardWork:
    """Multiply-adds of a model.

    `weights`: of a row with weights. `attention`: (those for each position that a row sees, window)
        of layers that are alike; a window of None sees all positions.
    """

    weights: int
    attention: tuple[tuple[int, int | None], ...]

    def of_row(self, position: int) -> int:
        seen = position + 1
        return self.weights + sum(
            each * (seen if window is None else min(seen, window))
            for each, window in self.attention
        )

    def of_chunk(self, start: int, length: int) -> int:
        """Upper bound, as if every row were at the last position."""
        return length * self.of_row(start + length - 1)


@dataclass(frozen=True, slots=True)
class WorkBudget:
    """The multiply-adds that a step may have."""

    forward: ForwardWork
    amount: float

    def rows(self, start: int, max_rows: int, used: float) -> int:
        """Rows of a chunk from `start` that fit what is left after `used`, at most `max_rows`."""
        if max_rows <= 0:
            return 0
        left = max(0.0, self.amount - used)
        return min(max_rows, int(left / self.forward.of_row(start + max_rows - 1)))

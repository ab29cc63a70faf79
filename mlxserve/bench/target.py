"""A target that a measured figure should meet: a number, or a multiple of another server's figure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mlxserve.bench.report import ratios

BEST = "the best other"  # baseline: the server with the best median


@dataclass(frozen=True, slots=True)
class Target:
    """A bound on a figure.

    value: the maximum of the figure
    is_floor: it is the minimum instead
    baseline: the server whose figure is the unit of `value`; None for a plain number
    """

    value: float
    is_floor: bool = False
    baseline: str | None = None

    def text(self) -> str:
        bound = f"{'at least' if self.is_floor else 'at most'} {self.value:g}"
        return bound if self.baseline is None else f"{bound} × {self.baseline}"

    def is_met(self, measured: float) -> bool:
        return measured >= self.value if self.is_floor else measured <= self.value

    def measured(
        self, ours: Sequence[float], others: Mapping[str, Sequence[float]]
    ) -> float | None:
        """The number to compare with `value`: a median of figures, or of ratios run by run.

        None without the baseline.
        """
        if self.baseline is None:
            return statistics.median(ours)
        theirs = self._theirs(others)
        return None if theirs is None else statistics.median(ratios(ours, theirs))

    def _theirs(self, others: Mapping[str, Sequence[float]]) -> Sequence[float] | None:
        if self.baseline != BEST:
            return others.get(self.baseline or "")
        best = max if self.is_floor else min
        return best(others.values(), key=statistics.median, default=None)

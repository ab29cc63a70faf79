"""Measurement: one figure of the report file, ours next to mlx-lm's."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Measurement:
    """A figure; None if it could not be measured, for the reason in `absent`."""

    name: str
    unit: str
    ours: float | None = None
    mlx_lm: float | None = None
    absent: str | None = None

    def __str__(self) -> str:
        figures = ", ".join(
            f"{who} {value:,.{0 if value >= 100 else 2}f} {self.unit}"
            for who, value in (("mlxserve", self.ours), ("mlx-lm", self.mlx_lm))
            if value is not None
        )
        reason = f"absent: {self.absent}" if self.absent else ""
        return f"{self.name}: {'; '.join(part for part in (figures, reason) if part)}"

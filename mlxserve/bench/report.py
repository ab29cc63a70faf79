"""Figures of a benchmark: medians with their spread, paired ratios, a table and JSON."""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True, slots=True)
class Figure:
    """What was measured under one name, once per run."""

    name: str
    unit: str
    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    def text(self) -> str:
        return f"{self.median:.3g} {self.unit}".rstrip()

    def spread(self) -> str:
        return f"{min(self.values):.3g} … {max(self.values):.3g}"


@dataclass(frozen=True, slots=True)
class Report:
    """One workload's figures, and what they were measured on."""

    workload: str
    settings: dict[str, Any]
    figures: tuple[Figure, ...]
    machine: dict[str, str] = field(default_factory=lambda: machine())

    def show(self, console: Console | None = None) -> None:
        console = console or Console()
        table = Table(title=f"mlxserve bench {self.workload}", title_justify="left")
        for column in ("", "median", "spread", "runs"):
            table.add_column(column, justify="left" if not column else "right")
        for figure in self.figures:
            table.add_row(figure.name, figure.text(), figure.spread(), str(len(figure.values)))
        console.print(table)
        facts = {**self.settings, **self.machine}
        console.print(", ".join(f"{name} {value}" for name, value in facts.items()), style="dim")

    def write_json(self, file: Path) -> None:
        content = {
            "workload": self.workload,
            "settings": self.settings,
            "machine": self.machine,
            "figures": [
                {"name": f.name, "unit": f.unit, "median": f.median, "values": list(f.values)}
                for f in self.figures
            ],
        }
        file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def machine() -> dict[str, str]:
    """What absolute numbers mean nothing without."""
    load = os.getloadavg()[0]
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "cores": str(os.cpu_count()),
        "load": f"{load:.1f}",
        "mlx": version("mlx"),
        "mlx-lm": version("mlx-lm"),
    }


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, ...]:
    """Ours over theirs, run by run: what both runs of a pair suffered cancels out."""
    return tuple(a / b for a, b in zip(ours, theirs, strict=True))

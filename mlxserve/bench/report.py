"""Benchmark figures: medians with their spread, paired ratios, a table and JSON."""

from __future__ import annotations

import json
import math
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
    """One measured quantity, one value per run."""

    name: str
    unit: str
    values: tuple[float, ...]
    who: str = ""  # the contender, where a report compares several

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    def text(self) -> str:
        return f"{self.median:.3g} {self.unit}".rstrip()

    def spread(self) -> str:
        return f"{min(self.values):.3g}…{max(self.values):.3g}"


@dataclass(frozen=True, slots=True)
class Report:
    """One workload's figures, with its settings and the machine."""

    workload: str
    settings: dict[str, Any]
    figures: tuple[Figure, ...]
    machine: dict[str, str] = field(default_factory=lambda: machine())

    def show(self, console: Console | None = None, program: str = "mlxserve bench") -> None:
        """Print a table; `program` is what the workload is a command of."""
        console = console or Console()
        table = Table(title=f"{program} {self.workload}", title_justify="left")
        (_add_columns if any(f.who for f in self.figures) else _add_rows)(table, self.figures)
        console.print(table)
        facts = {**self.settings, **self.machine}
        console.print(", ".join(f"{name} {value}" for name, value in facts.items()), style="dim")

    def write_json(self, file: Path) -> None:
        content = {
            "workload": self.workload,
            "settings": self.settings,
            "machine": self.machine,
            "figures": [
                {
                    "name": f.name,
                    "unit": f.unit,
                    **({"who": f.who} if f.who else {}),
                    "median": f.median,
                    "values": list(f.values),
                }
                for f in self.figures
            ],
        }
        file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _add_rows(table: Table, figures: Sequence[Figure]) -> None:
    for column in ("", "median", "spread", "runs"):
        table.add_column(column, justify="left" if not column else "right")
    for figure in figures:
        table.add_row(figure.name, figure.text(), figure.spread(), str(len(figure.values)))


def _add_columns(table: Table, figures: Sequence[Figure]) -> None:
    """One column per contender; each cell shows a median above its spread."""
    contenders = list(dict.fromkeys(figure.who for figure in figures))
    table.add_column("")
    for who in contenders:
        table.add_column(who, justify="right")
    for name in dict.fromkeys(figure.name for figure in figures):
        cells = {figure.who: figure for figure in figures if figure.name == name}
        texts = [
            f"{cells[who].text()}\n[dim]{cells[who].spread()}[/]" if who in cells else ""
            for who in contenders
        ]
        table.add_row(name, *texts)


def machine() -> dict[str, str]:
    """The machine and versions that absolute numbers depend on."""
    load = os.getloadavg()[0]
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "cores": str(os.cpu_count()),
        "load": f"{load:.1f}",
        "mlx": version("mlx"),
        "mlx-lm": version("mlx-lm"),
    }


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, ...]:
    """Ours over theirs, run by run: noise common to both runs of a pair cancels out."""
    return tuple(a / b for a, b in zip(ours, theirs, strict=True))


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of all values do not exceed. NaN if there are none."""
    if not values:
        return math.nan
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]

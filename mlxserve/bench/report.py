"""Benchmark figures: medians with their spread, paired ratios, a table and JSON."""

from __future__ import annotations

import json
import math
import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from mlxserve.system.terminal_text import escaped


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
class Note:
    """A text cell, in the row of the figures with its name and in the column `who`."""

    name: str
    who: str
    text: str


@dataclass(frozen=True, slots=True)
class Report:
    """One workload's figures, with its settings and the machine."""

    workload: str
    settings: dict[str, Any]
    figures: tuple[Figure, ...]
    machine: dict[str, str] = field(default_factory=lambda: machine())
    notes: tuple[Note, ...] = ()

    def show(self, console: Console | None = None, program: str = "mlxserve bench") -> None:
        """Print a table; `program` has the workload as a command."""
        console = console or Console()
        table = Table(title=as_words(f"{program} {self.workload}"), title_justify="left")
        if self.notes or any(figure.who for figure in self.figures):
            _add_columns(table, self.figures, self.notes)
        else:
            _add_rows(table, self.figures)
        console.print(table)
        facts = {**self.settings, **self.machine}
        text = ", ".join(f"{name} {value}" for name, value in facts.items())
        console.print(as_words(text), style="dim")

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
        if self.notes:
            content["notes"] = [asdict(note) for note in self.notes]
        file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _add_rows(table: Table, figures: Sequence[Figure]) -> None:
    for column in ("", "median", "spread", "runs"):
        table.add_column(column, justify="left" if not column else "right")
    for figure in figures:
        table.add_row(
            as_words(figure.name), figure.text(), figure.spread(), str(len(figure.values))
        )


def _add_columns(table: Table, figures: Sequence[Figure], notes: Sequence[Note]) -> None:
    """Add a column per contender; each cell shows a median above its spread, or a note."""
    places = [(f.name, f.who) for f in figures] + [(note.name, note.who) for note in notes]
    columns = list(dict.fromkeys(who for _, who in places))
    table.add_column("")
    for who in columns:
        table.add_column(as_words(who), justify="right")
    cells = {(note.name, note.who): as_words(note.text) for note in notes}
    cells |= {(f.name, f.who): f"{f.text()}\n[dim]{f.spread()}[/]" for f in figures}
    for name in dict.fromkeys(name for name, _ in places):
        table.add_row(as_words(name), *(cells.get((name, who), "") for who in columns))


def as_words(text: str) -> str:
    """Escape a text for rich and the terminal."""
    return escape(escaped(text))


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


def growth_exponent(sizes: Sequence[float], costs: Sequence[float]) -> float:
    """Exponent e with costs ~ size ** e, by least squares of their logarithms."""
    slope, _ = statistics.linear_regression(
        [math.log(size) for size in sizes], [math.log(cost) for cost in costs]
    )
    return slope


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of all values do not exceed. NaN if there are none."""
    if not values:
        return math.nan
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]

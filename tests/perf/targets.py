"""mlxserve's speed targets that compare options or libraries, each next to its baseline in one run.

A row compares a figure of another measurement with a target. This module measures nothing itself.
`mlxserve bench table` has the targets that compare servers.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from rich.console import Console
from rich.table import Table

from mlxserve.bench.decode import bench_batch_decode, bench_decode
from mlxserve.bench.report import Report, machine
from mlxserve.bench.serving import WORKLOADS, bench_serving
from mlxserve.bench.target import Target
from tests.perf.sched import bench_sched

_OFF = "without cache"
Measure = Callable[[], Report]


@dataclass(frozen=True, slots=True)
class SpeedTarget:
    """A figure of a measurement and its bound; a bound of None only reports it."""

    name: str
    bench: str
    figure: str
    bound: Target | None
    who: str = ""  # the contender
    baseline: str = ""  # contender whose same figure is shown for comparison


TARGETS = (
    SpeedTarget("one answer, tokens/s over mlx-lm's", "decode", "ratio", Target(0.97, True)),
    SpeedTarget(
        "16 answers that share a prefix, tokens/s over mlx-lm's",
        *("batch decode", "ratio", Target(1.5, True)),
    ),
    SpeedTarget(
        "prompts that share a third, requests/s over those without the cache",
        *("prefix", "requests/s", Target(1.25, True), f"÷ {_OFF}"),
    ),
    SpeedTarget(
        "prompts of 16 pages, 12 cached, requests/s over those without the cache",
        *("admission", "requests/s", Target(1.25, True), f"÷ {_OFF}"),
    ),
    SpeedTarget(
        "the same, answer tokens/s",
        *("admission", "answer tokens/s", Target(1.5, True), f"÷ {_OFF}"),
    ),
    SpeedTarget(
        "page-aligned chunks, requests/s over unaligned ones",
        *("aligned", "requests/s", None, "÷ unaligned"),
    ),
    SpeedTarget(
        "plan and commit a step of 256 answers with 100,000 tokens each, in microseconds",
        *("sched", "256 running, 100,000 tokens each", Target(500)),
    ),
)


@dataclass(frozen=True, slots=True)
class TargetRow:
    """A target with its measured values, one per run."""

    target: SpeedTarget
    values: tuple[float, ...]
    baseline: tuple[float, ...]

    @property
    def is_met(self) -> bool:
        bound = self.target.bound
        return bound is None or bound.is_met(statistics.median(self.values))


def measures(model: str, pairs: int, progress: Callable[[str], None]) -> dict[str, Measure]:
    """The measurements by name."""

    def served(name: str) -> Report:
        """Our server's variants."""
        return bench_serving(
            WORKLOADS[name],
            model,
            pairs=pairs,
            size=1.0,
            num_pages=1024,
            progress=lambda text: progress(f"{name}: {text}"),
        )

    return {
        "decode": lambda: bench_decode(model, pairs=pairs, context=128, tokens=64),
        "batch decode": lambda: bench_batch_decode(
            model, pairs=pairs, batch=16, shared=1536, own=64, tokens=32
        ),
        **{name: partial(served, name) for name in ("prefix", "admission", "aligned")},
        "sched": lambda: bench_sched(running=[256], contexts=[100_000], rounds=10),
    }


def bench_targets(
    benches: dict[str, Measure],
    targets: Sequence[SpeedTarget] = TARGETS,
    progress: Callable[[str], None] = lambda _: None,
) -> Iterator[TargetRow]:
    """Each target's row as soon as its measurement is done; each measurement runs once."""

    @cache
    def report(bench: str) -> Report:
        progress(bench)
        return benches[bench]()

    for target in targets:
        found = report(target.bench)
        baseline = _values(found, target.figure, target.baseline) if target.baseline else ()
        yield TargetRow(target, _values(found, target.figure, target.who), baseline)


def _values(report: Report, name: str, who: str) -> tuple[float, ...]:
    """Raises LookupError if the report has no such figure, because a request failed."""
    for figure in report.figures:
        if (figure.name, figure.who) == (name, who):
            return figure.values
    raise LookupError(f"bench {report.workload} has no {name!r} of {who or 'the run'}")


def show(rows: Sequence[TargetRow], console: Console | None = None) -> None:
    console = console or Console()
    table = Table(title="tests.perf targets", title_justify="left")
    for column in ("", "mlxserve", "baseline", "target", ""):
        table.add_column(column, justify="right" if column in ("mlxserve", "baseline") else "left")
    for row in rows:
        bound = row.target.bound
        table.add_row(
            row.target.name,
            _text(row.values),
            f"{_text(row.baseline)}\n[dim]{row.target.baseline}[/]" if row.baseline else "",
            bound.text() if bound else "measured",
            "" if bound is None else "met" if row.is_met else "[red]missed[/]",
        )
    console.print(table)
    console.print(", ".join(f"{name} {value}" for name, value in machine().items()), style="dim")


def _text(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.3g}\n[dim]{min(values):.3g}…{max(values):.3g}[/]"


def as_json(rows: Sequence[TargetRow]) -> dict[str, Any]:
    return {
        "machine": machine(),
        "targets": [
            {
                "name": row.target.name,
                "bench": row.target.bench,
                "median": statistics.median(row.values),
                "values": list(row.values),
                "baseline": list(row.baseline),
                "bound": row.target.bound.text() if row.target.bound else None,
                "met": row.is_met,
            }
            for row in rows
        ],
    }

"""`mlxserve bench table`: our server next to others in one run, with our targets.

Each row is a figure of a load that has a command of its own. All servers run at the same time, and
each load is played on one after the other, in rounds.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from mlxserve.bench import loads
from mlxserve.bench.report import Figure, Note, Report
from mlxserve.bench.servers import Contender, ServerFailed
from mlxserve.bench.serving import (
    MLX_LM,
    WORKLOADS,
    PlayedRound,
    Variant,
    contenders,
    play_rounds,
)
from mlxserve.bench.startup import READY, bench_startup
from mlxserve.bench.target import BEST, Target
from mlxserve.core.errors import MlxServeError, in_one_line

_OURS = "mlxserve"
_TARGET = "target"  # the last column
_STARTUP = "startup"
_STARTED = (
    "mlxserve-mini"  # the model of the timed starts: most of their time does not depend on it
)
# The loads of the table and their sizes at --size 1.
_SIZES = {"beside": 1.0, "siblings": 2.5, "lengths": 1.0, "again": 1.0, "answers": 1.0}
# Share of a load's size: what a first request loads or compiles depends little on it.
_WARM_UP = 0.1
_FAILURES = (MlxServeError, httpx.HTTPError, LookupError, ValueError, OSError)


@dataclass(frozen=True, slots=True)
class TableRow:
    """A figure of a load.

    name, figure: "{}" is the length of the prompt
    tokens: that length at size 1
    scale: from the figure's unit to the name's
    """

    name: str
    load: str
    figure: str
    target: Target | None = None
    tokens: int = 0
    scale: float = 1.0

    def name_at(self, size: float) -> str:
        return self.name.format(f"{loads.scaled(self.tokens, size):,}")

    def figure_at(self, size: float) -> str:
        return self.figure.format(loads.scaled(self.tokens, size))


def _first_token(tokens: int, target: Target) -> TableRow:
    figure = "first token, {} tokens p50, ms"
    return TableRow("first token, {} cold tokens, s", "lengths", figure, target, tokens, 1e-3)


def _rate(name: str, label: str, target: Target) -> TableRow:
    return TableRow(f"{name}, tokens/s", "answers", loads.rate_name(label), target)


ROWS = (
    TableRow(
        "longest gap of an answer while {} tokens are computed, idle steps",
        *("beside", loads.GAP, Target(6), 2500),
    ),
    TableRow(
        "first token of a short prompt beside an answer, idle steps",
        *("beside", loads.SHORT, Target(2)),
    ),
    TableRow(
        "first token of a short prompt beside an answer, ms",
        *("beside", "first token, short prompt p50, ms"),
    ),
    TableRow(
        "4 cold prompts that share {} tokens, over one alone",
        *("siblings", loads.TOGETHER, Target(1.0), 1500),
    ),
    _first_token(300, Target(1.0, baseline=BEST)),
    _first_token(1500, Target(0.8, baseline=MLX_LM)),
    _first_token(3000, Target(0.8, baseline=MLX_LM)),
    TableRow(loads.GROWTH, "lengths", loads.GROWTH, Target(1.0, baseline=BEST)),
    TableRow(
        "first token, {} tokens again, ms",
        *("again", "first token, again p50, ms", None, 600),
    ),
    TableRow("tokens computed for {} tokens again", "again", loads.COMPUTED_AGAIN, Target(32), 600),
    _rate("16 different answers at once", loads.SIXTEEN, Target(1.1, True, BEST)),
    _rate("4 different answers at once", loads.FOUR, Target(1.1, True, BEST)),
    _rate("one answer", loads.ONE, Target(1.0, True, BEST)),
    _rate("16 answers on one prefix", loads.ON_PREFIX, Target(2.0, True, MLX_LM)),
    TableRow("ready, s", _STARTUP, READY, Target(1.0, baseline=MLX_LM)),
)


@dataclass(slots=True)
class Measurements:
    """The rounds that were played, or why there are none, by load and server."""

    rounds: dict[tuple[str, str], Sequence[PlayedRound]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)  # failures by server

    def cell(self, row: TableRow, who: str, size: float) -> tuple[float, ...] | str:
        """The figure in each round, or why there is none; empty if it is not to be measured."""
        rounds = self.rounds.get((row.load, who))
        if rounds is None:
            was_to_be = who in self.failures and row.load != _STARTUP
            return f"failed: {self.failures[who]}" if was_to_be else ""
        values = [each.figures.get(row.figure_at(size), math.nan) for each in rounds]
        if not any(map(math.isnan, values)):
            return tuple(row.scale * value for value in values)
        failures = [each.failure for each in rounds if each.failure is not None]
        return f"failed: {failures[0]}" if failures else "failed: its answers were too short"


def bench_table(
    model: str,
    *,
    against: Sequence[str],
    pairs: int,
    size: float,
    num_pages: int,
    progress: Callable[[str], None] = lambda _: None,
) -> Report:
    """Measure every row on our server, on mlx-lm's if `against` has it, and on running servers.

    A failure on one server is a note in its column.
    """
    measured = Measurements()
    _start(measured, [MLX_LM] if MLX_LM in against else [], pairs, progress)
    with contextlib.ExitStack() as stack:
        servers: list[Contender] = []
        for name, contender in contenders([Variant(_OURS)], model, against, num_pages).items():
            progress(f"starting {name}")
            try:
                servers.append(stack.enter_context(contender))
            except _FAILURES as error:
                measured.failures[name] = _sentence(error)
        for load, factor in _SIZES.items():
            played = asyncio.run(
                play_rounds(
                    WORKLOADS[load],
                    servers,
                    pairs,
                    factor * size,
                    lambda text, load=load: progress(f"{load}: {text}"),  # type: ignore[misc]
                    warm_up=_WARM_UP,
                )
            )
            measured.rounds |= {(load, who): rounds for who, rounds in played.items()}
    settings = {"model": Path(model).name, "pairs": pairs, "size": size}
    return table_of(measured, (_OURS, *against), size, settings)


def _start(
    measured: Measurements, against: Sequence[str], pairs: int, progress: Callable[[str], None]
) -> None:
    progress("starts")
    try:
        report = bench_startup(_STARTED, against=against, pairs=pairs)
    except ServerFailed as error:
        failed = PlayedRound({}, _sentence(error))
        measured.rounds |= {(_STARTUP, who): [failed] for who in (_OURS, *against)}
        return
    for figure in report.figures:
        if figure.name == READY and not figure.who.startswith("÷"):
            rounds = [PlayedRound({READY: value}, None) for value in figure.values]
            measured.rounds[_STARTUP, figure.who] = rounds


def table_of(
    measured: Measurements, servers: Iterable[str], size: float, settings: dict[str, object]
) -> Report:
    """Build the table: rows as rows, servers as columns, our targets last."""
    figures: list[Figure] = []
    failures: list[Note] = []
    targets: list[Note] = []
    for row in ROWS:
        name, values = row.name_at(size), {}
        for who in servers:
            cell = measured.cell(row, who, size)
            if isinstance(cell, str):
                if cell:
                    failures.append(Note(name, who, cell))
            else:
                values[who] = cell
                figures.append(Figure(name, "", cell, who))
        if row.target is not None:
            targets.append(Note(name, _TARGET, verdict(row.target, values)))
    return Report("table", settings, tuple(figures), notes=(*failures, *targets))


def verdict(target: Target, values: dict[str, tuple[float, ...]]) -> str:
    """The target, and whether our server met it, if it and the baseline were measured."""
    others = {who: each for who, each in values.items() if who != _OURS}
    measured = target.measured(values[_OURS], others) if _OURS in values else None
    if measured is None:
        return target.text()
    if target.is_met(measured):
        return f"{target.text()}: met"
    return f"{target.text()}: missed ({measured:.3g})"


def _sentence(error: Exception) -> str:
    return in_one_line(error)[:120]

"""The table of servers: its rows, what failed, and whether targets are met."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from mlxserve.bench import loads, table
from mlxserve.bench.cli import app
from mlxserve.bench.report import Figure, Report
from mlxserve.bench.servers import Contender, ServerFailed
from mlxserve.bench.serving import MLX_LM, WORKLOADS, PlayedRound
from mlxserve.bench.startup import READY
from mlxserve.bench.table import ROWS, Measurements, TableRow, bench_table, table_of

OURS = "mlxserve"
URL = "http://127.0.0.1:9"  # nothing listens there


def played(row: TableRow, *values: float) -> list[PlayedRound]:
    return [PlayedRound({row.figure_at(1.0): value}, None) for value in values]


def row_of(figure: str) -> TableRow:
    [row] = [row for row in ROWS if row.figure_at(1.0) == figure]
    return row


def notes(report: Report) -> dict[tuple[str, str], str]:
    return {(note.name, note.who): note.text for note in report.notes}


def test_every_row_is_a_figure_of_an_existing_load_of_one_variant() -> None:
    for load in {row.load for row in ROWS} - {"startup"}:
        assert WORKLOADS[load].variants[0].name == OURS
        assert WORKLOADS[load].variants[0].options == ()


def test_names_and_figures_follow_the_size() -> None:
    row = row_of("first token, 1500 tokens p50, ms")
    assert row.name_at(1.0) == "first token, 1,500 cold tokens, s"
    assert row.name_at(0.1) == "first token, 150 cold tokens, s"
    assert row.figure_at(0.1) == "first token, 150 tokens p50, ms"


def test_targets_are_judged_by_our_figures_and_ratios() -> None:
    gap, long, rate = (
        row_of(loads.GAP),
        row_of("first token, 3000 tokens p50, ms"),
        row_of(loads.rate_name(loads.SIXTEEN)),
    )
    measured = Measurements(
        {
            ("beside", OURS): played(gap, 5.0, 6.0, 90.0),
            ("lengths", OURS): played(long, 9000.0, 18_000.0),
            ("lengths", MLX_LM): played(long, 10_000.0, 20_000.0),
            ("answers", OURS): played(rate, 120.0),
            ("answers", MLX_LM): played(rate, 100.0),
            ("answers", URL): played(rate, 110.0),
        }
    )
    report = table_of(measured, (OURS, MLX_LM, URL), 1.0, {})
    found = notes(report)
    assert found[gap.name_at(1.0), "target"] == "at most 6: met"
    assert found[long.name_at(1.0), "target"] == "at most 0.8 × mlx-lm: missed (0.9)"
    assert found[rate.name_at(1.0), "target"] == "at least 1.1 × the best other: missed (1.09)"
    assert Figure(long.name_at(1.0), "", (9.0, 18.0), OURS) in report.figures


def test_a_target_without_its_baseline_is_only_shown() -> None:
    long = row_of("first token, 3000 tokens p50, ms")
    report = table_of(Measurements({("lengths", OURS): played(long, 9.0)}), (OURS,), 1.0, {})
    assert notes(report)[long.name_at(1.0), "target"] == "at most 0.8 × mlx-lm"


def test_what_failed_is_a_sentence_in_its_cell() -> None:
    gap, ready = row_of(loads.GAP), row_of(READY)
    measured = Measurements(
        {
            ("beside", OURS): [PlayedRound({}, None)],
            ("beside", MLX_LM): [*played(gap, 5.0), PlayedRound({}, "429: full")],
        },
        failures={URL: "it did not answer"},
    )
    found = notes(table_of(measured, (OURS, MLX_LM, URL), 1.0, {}))
    name = gap.name_at(1.0)
    assert found[name, OURS] == "failed: its answers were too short"
    assert found[name, MLX_LM] == "failed: 429: full"
    assert found[name, URL] == "failed: it did not answer"
    assert (ready.name_at(1.0), URL) not in found, "a running server is not started"


def test_the_table_has_a_column_for_each_server_and_the_targets() -> None:
    gap = row_of(loads.GAP)
    measured = Measurements({("beside", OURS): played(gap, 5.0)}, failures={URL: "[no] answer"})
    console = Console(record=True, width=150, file=io.StringIO())
    table_of(measured, (OURS, URL), 1.0, {"pairs": 1}).show(console)
    text = console.export_text()
    header = text.splitlines()[2]
    assert header.index(OURS) < header.index(URL) < header.index("target")
    for part in ("failed: [no] answer", "at most 6: met", "2,500", "pairs 1"):
        assert part in text


@pytest.fixture(name="no_servers")
def no_servers_fixture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our server does not start, nothing listens at the URL, and starts take 1 and 2 seconds."""

    @contextlib.contextmanager
    def fails() -> Iterator[Contender]:
        raise ServerFailed("mlxserve did not start; the end of its log:\nno memory")
        yield

    def contenders(*_: object) -> dict[str, AbstractContextManager[Contender]]:
        there = contextlib.nullcontext(Contender(URL, URL, "m"))
        return {OURS: fails(), URL: there}

    def starts(_model: str, *, against: list[str], pairs: int) -> Report:
        figures = [Figure(READY, "", (1.0,) * pairs, OURS)]
        figures += [Figure(READY, "", (2.0,) * pairs, MLX_LM) for _ in against]
        return Report("startup", {}, (*figures, Figure("other", "", (3.0,), OURS)))

    monkeypatch.setattr(table, "contenders", contenders)
    monkeypatch.setattr(table, "bench_startup", starts)


@pytest.mark.usefixtures("no_servers")
def test_a_server_that_fails_does_not_end_the_others_or_the_run() -> None:
    report = bench_table("m", against=[URL, MLX_LM], pairs=1, size=0.01, num_pages=64)
    found = notes(report)
    name = row_of(loads.GAP).name_at(0.01)
    assert found[name, OURS] == "failed: mlxserve did not start; the end of its log: no memory"
    assert found[name, URL].startswith("failed: ConnectError")
    ready = row_of(READY).name_at(0.01)
    assert {(f.who, f.values) for f in report.figures} == {(OURS, (1.0,)), (MLX_LM, (2.0,))}
    assert found[ready, "target"] == "at most 1 × mlx-lm: met"


@pytest.mark.usefixtures("no_servers")
def test_starts_that_fail_are_a_sentence_in_their_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def starts(*_: object, **__: object) -> Report:
        raise ServerFailed("mlx-lm did not start")

    monkeypatch.setattr(table, "bench_startup", starts)
    report = bench_table("m", against=[], pairs=1, size=0.01, num_pages=64)
    assert notes(report)[row_of(READY).name_at(0.01), OURS] == "failed: mlx-lm did not start"


@pytest.mark.long
def test_the_command_measures_every_row_of_a_real_server(tmp_path: Path) -> None:
    file = tmp_path / "table.json"
    options = ["--model", "mlxserve-mini", "--pairs", "1", "--size", "0.05", "--num-pages", "256"]
    result = CliRunner().invoke(app, ["table", *options, "--json", str(file)])
    assert result.exit_code == 0, result.output
    content: dict[str, Any] = json.loads(file.read_text())
    measured = {figure["name"] for figure in content["figures"]}
    # On a busy machine the first of 16 short answers has ended before the last one begins.
    over = {note["name"] for note in content["notes"] if "too short" in note["text"]}
    assert measured | over == {row.name_at(0.05) for row in ROWS}
    assert over <= {row.name_at(0.05) for row in ROWS if row.name.endswith("tokens/s")}
    others = {note["who"] for note in content["notes"] if note["name"] not in over}
    assert others == {"target"}

"""Targets are compared with figures of measurements, each of which runs once."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from mlxserve.bench import serving
from mlxserve.bench.report import Figure, Report
from mlxserve.bench.target import Target
from tests.perf import targets
from tests.perf.cli import app
from tests.perf.targets import SpeedTarget, TargetRow

RATE = SpeedTarget(
    "requests/s", "prefix", "requests/s", Target(1.25, is_floor=True), "÷ off", "off"
)
GAP = SpeedTarget("gap", "prefix", "gap", Target(2.0))


def report() -> Report:
    figures = (
        Figure("requests/s", "", (1.2, 1.3, 1.4), "÷ off"),
        Figure("requests/s", "", (1.0, 1.0, 1.0), "off"),
        Figure("gap", "", (1.0, 3.0, 5.0)),
    )
    return Report("prefix", {}, figures, machine={})


def test_a_measurement_runs_once_and_its_median_is_compared_with_the_bound() -> None:
    ran: list[str] = []

    def measure() -> Report:
        ran.append("prefix")
        return report()

    rows = list(targets.bench_targets({"prefix": measure}, (RATE, GAP)))
    assert ran == ["prefix"]
    assert [(row.values, row.baseline, row.is_met) for row in rows] == [
        ((1.2, 1.3, 1.4), (1.0, 1.0, 1.0), True),
        ((1.0, 3.0, 5.0), (), False),
    ]


def test_a_missing_figure_is_an_error() -> None:
    lost = SpeedTarget("lost", "prefix", "lost", None, "mlxserve")
    with pytest.raises(LookupError, match="bench prefix has no 'lost' of mlxserve"):
        list(targets.bench_targets({"prefix": report}, (lost,)))


def test_the_table_marks_missed_targets() -> None:
    console = Console(width=100, record=True, file=io.StringIO())
    targets.show([TargetRow(RATE, (1.3,), (1.0,)), TargetRow(GAP, (3.0,), ())], console)
    text = console.export_text()
    assert "at least 1.25" in text
    assert "met" in text
    assert "missed" in text


def test_every_target_names_an_existing_measurement_and_contender() -> None:
    benches = targets.measures("model", 1, lambda _: None)
    assert {target.bench for target in targets.TARGETS} == set(benches)
    for target in targets.TARGETS:
        if target.bench in serving.WORKLOADS and target.who.startswith("÷"):
            variants = serving.WORKLOADS[target.bench].variants
            assert target.who[2:] in [variant.name for variant in variants[1:]]


def test_the_command_exits_with_1_if_a_target_is_missed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(targets, "measures", lambda *_: {"prefix": report})
    monkeypatch.setattr(targets, "TARGETS", (RATE,))
    met = CliRunner().invoke(app, ["targets", "--model", "x", "--json", str(tmp_path / "f.json")])
    assert met.exit_code == 0, met.output
    (written,) = json.loads((tmp_path / "f.json").read_text())["targets"]
    assert (written["met"], written["median"], written["bound"]) == (True, 1.3, "at least 1.25")
    monkeypatch.setattr(targets, "TARGETS", (RATE, GAP))
    assert CliRunner().invoke(app, ["targets", "--model", "x"]).exit_code == 1
    refused = CliRunner().invoke(app, ["targets", "--model", "x", "--only", "nothing"])
    assert refused.exit_code == 2
    assert "is not one of prefix" in " ".join(refused.output.split())

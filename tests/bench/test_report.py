"""Reports: quantiles, paired ratios, tables with one column or one per contender, and JSON."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path

import pytest
from rich.console import Console

from mlxserve.bench.report import Figure, Note, Report, growth_exponent, quantile, ratios


def shown(report: Report) -> str:
    console = Console(record=True, width=80, file=io.StringIO())
    report.show(console)
    return console.export_text()


def test_a_quantile_is_one_of_the_values() -> None:
    for share, value in [(0.0, 1.0), (0.2, 1.0), (0.5, 3.0), (0.95, 5.0), (1.0, 5.0)]:
        assert quantile([5.0, 1.0, 4.0, 2.0, 3.0], share) == value, share


def test_a_quantile_of_nothing_is_not_a_number() -> None:
    assert math.isnan(quantile([], 0.5))


def test_ratios_are_taken_pair_by_pair() -> None:
    assert ratios((2.0, 9.0), (1.0, 3.0)) == (2.0, 3.0)


def test_a_report_of_one_contender_has_a_row_per_figure() -> None:
    text = shown(Report("demo", {"pairs": 3}, (Figure("rate", "/s", (1.0, 2.0, 9.0)),), {"n": "2"}))
    for part in ("mlxserve bench demo", "rate", "2 /s", "1…9", "pairs 3, n 2"):
        assert part in text


def test_a_report_of_several_contenders_has_a_column_for_each() -> None:
    figures = (
        Figure("rate", "", (1.0, 3.0), "ours"),
        Figure("rate", "", (1.0, 1.0), "theirs"),
        Figure("rate", "", (1.0, 3.0), "÷ theirs"),
    )
    text = shown(Report("demo", {}, figures, {}))
    for part in ("ours", "÷ theirs", "1…3"):
        assert part in text


def test_json_has_every_value_and_its_median(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    Report("demo", {}, (Figure("rate", "/s", (1.0, 2.0, 9.0)),), {}).write_json(file)
    [figure] = json.loads(file.read_text())["figures"]
    assert figure == {"name": "rate", "unit": "/s", "median": 2.0, "values": [1.0, 2.0, 9.0]}


def test_names_and_notes_are_shown_as_they_are() -> None:
    """They come from folders and from other servers."""
    hostile, safe = "a\x1b]0;x\x07\u202e[/b]", r"a\x1b]0;x\x07\u202e[/b]"
    several = Report(
        hostile,
        {hostile: hostile},
        (Figure(hostile, "", (1.0,), hostile),),
        {},
        (Note("other", hostile, hostile),),
    )
    for report in (several, Report("demo", {}, (Figure(hostile, "", (1.0,)),), {})):
        text = shown(report)
        assert not set(text) & set("\x1b\x07\u202e")
        assert safe in text


def test_notes_are_cells_of_text_in_their_row_and_column(tmp_path: Path) -> None:
    notes = (Note("rate", "theirs", "failed: [no]"), Note("other", "ours", "text"))
    report = Report("demo", {}, (Figure("rate", "", (1.0,), "ours"),), {}, notes)
    rows = shown(report).splitlines()
    assert next("failed: [no]" in row and "1" in row for row in rows if "rate" in row)
    assert any("other" in row and "text" in row for row in rows)
    file = tmp_path / "figures.json"
    report.write_json(file)
    assert json.loads(file.read_text())["notes"][1] == {
        "name": "other",
        "who": "ours",
        "text": "text",
    }


def test_an_exponent_is_the_slope_of_the_logarithms() -> None:
    assert growth_exponent((1, 10, 100), (5.0, 50.0, 500.0)) == pytest.approx(1)
    assert growth_exponent((2, 8), (3.0, 6.0)) == pytest.approx(0.5)

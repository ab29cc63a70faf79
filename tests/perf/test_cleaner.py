"""The measurement of the cleaner: in idle steps, as the difference to a run without a disk."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mlxserve.disk.files import DiskFiles
from tests.perf.cleaner import CleanerRun, figures, slowed
from tests.perf.cli import app


def run(step: float, longest: float, num_written: int = 0) -> CleanerRun:
    return CleanerRun((step, step, 9 * step), (step, step, longest), num_written)


def test_gaps_are_compared_round_by_round_with_those_without_a_disk() -> None:
    runs = {
        "no disk": [run(1.0, 3.0), run(2.0, 8.0)],
        "disk": [run(1.0, 4.0, 7), run(2.0, 8.0, 9)],
        "slow disk": [run(1.0, 2.0), run(4.0, 16.0)],
    }
    found = {(figure.name, figure.who): figure.values for figure in figures(runs)}
    assert found["longest gap, idle steps", "no disk"] == (3, 4)
    more = "longest gap, more than without a disk"
    assert found[more, "disk"] == (1, 0)
    assert found[more, "slow disk"] == (-1, 4)
    assert (more, "no disk") not in found
    assert found["pages written meanwhile", "disk"] == (7, 9)


def test_a_slowed_disk_is_as_fast_as_before_afterwards(tmp_path: Path) -> None:
    before = DiskFiles.write, DiskFiles.read
    files = DiskFiles(tmp_path, b"i" * 16)
    with slowed(0.001):
        assert (DiskFiles.write, DiskFiles.read) != before
        files.write(b"name", b"payload")
        assert files.read(b"name") == b"payload"
    assert (DiskFiles.write, DiskFiles.read) == before


@pytest.mark.instruments
def test_pages_are_written_while_it_measures(tmp_path: Path) -> None:
    file = tmp_path / "cleaner.json"
    options = ["--pairs", "1", "--prompts", "10", "--slow-seconds", "0.05", "--json", str(file)]
    result = CliRunner().invoke(app, ["cleaner", *options])
    assert result.exit_code == 0, result.output
    written = {
        figure["who"]: figure["median"]
        for figure in json.loads(file.read_text())["figures"]
        if figure["name"] == "pages written meanwhile"
    }
    assert written["no disk"] == 0
    assert written["disk"] > 0  # how many depends on how fast the answers are
    assert 0 < written["slow disk"] < written["disk"]

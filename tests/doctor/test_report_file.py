"""The report file is JSON with a version, complete or marked as not, and names nobody."""

from __future__ import annotations

import getpass
import json
from pathlib import Path
from typing import Any

import pytest

from mlxserve.core.errors import InvalidConfig
from mlxserve.doctor.finding import Finding, Grade
from mlxserve.doctor.measurement import Measurement
from mlxserve.doctor.report_file import VERSION, ReportFile, anonymous


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    folder = tmp_path / "Users" / "ada"
    folder.mkdir(parents=True)
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.setattr(getpass, "getuser", lambda: "ada")
    return folder


def written(file: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return report


def test_a_report_holds_all_that_was_found(home: Path) -> None:
    file = home / "report.json"
    report = ReportFile(file, "a-model")
    report.add(Finding("ops", "no", Grade.BROKEN))
    report.add(Measurement("decode", "GB/s", 2.0, absent="mlx-lm: no"))
    report.complete({"pages": 7, "log": ["because"]})
    found = written(file)
    assert found.pop("created").endswith("+00:00")
    assert found == {
        "report": "mlxserve doctor",
        "version": VERSION,
        "model": "a-model",
        "is_complete": True,
        "findings": [{"name": "ops", "value": "no", "grade": "BROKEN"}],
        "figures": [
            {
                "name": "decode",
                "unit": "GB/s",
                "ours": 2.0,
                "mlx_lm": None,
                "absent": "mlx-lm: no",
            }
        ],
        "chosen": {"pages": 7, "log": ["because"]},
    }


def test_a_run_that_is_ended_leaves_what_it_found(home: Path) -> None:
    file = home / "report.json"
    report = ReportFile(file, "a-model")
    assert written(file)["is_complete"] is False
    report.add(Finding("ops", "well"))
    found = written(file)
    assert (found["is_complete"], len(found["findings"])) == (False, 1)


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(home: Path) -> None:
    with pytest.raises(InvalidConfig, match=r"No such file.*Name a file in a folder that exists"):
        ReportFile(home / "missing" / "report.json", "a-model")


def test_home_and_user_are_in_no_text(home: Path) -> None:
    texts = {
        f"python 3.12 ({home}/.venv/bin/python)": "python 3.12 (~/.venv/bin/python)",
        f"{home}": "~",
        "/Volumes/ada/models and /Users/ada": "/Volumes/USER/models and /Users/USER",
        f"{home}s/x": f"{home}s/x",  # another folder with a longer name
        "/opt/adamant": "/opt/adamant",
    }
    assert anonymous(list(texts)) == list(texts.values())
    assert anonymous({"log": [(f"{home}/a",)]}) == {"log": [["~/a"]]}
    assert anonymous([1, 2.5, None, True]) == [1, 2.5, None, True]


def test_a_home_that_is_a_link_is_known_by_both_names(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = home.parent / "link"
    link.symlink_to(home)
    monkeypatch.setenv("HOME", str(link))
    assert anonymous([f"{link}/a", f"{home}/a"]) == ["~/a", "~/a"]


def test_a_file_names_nobody(home: Path) -> None:
    file = home / "report.json"
    report = ReportFile(file, f"{home}/models/x")
    report.add(Finding("python", f"3.12 ({home}/bin/python)"))
    report.complete({"log": [f"{home}/models/x is loaded"]})
    text = file.read_text(encoding="utf-8")
    assert "ada" not in text
    assert "~/models/x is loaded" in text

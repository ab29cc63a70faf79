"""`mlxserve doctor`: its exit code follows its findings."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mlxserve.api.server.loop_watch import Blocked
from mlxserve.bench import cli as bench
from mlxserve.cli.running_servers import registered
from mlxserve.doctor import figures, report
from mlxserve.doctor.finding import Finding, Grade
from mlxserve.doctor.measurement import Measurement
from mlxserve.service import choice
from tests.api.fake_chat import FakeChat
from tests.api.serving import serving
from tests.cli.commands import Run


def test_doctor_exits_with_1_if_a_finding_is_broken(
    monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    findings = [Finding("python", "3.11"), Finding("matmul", "1", Grade.SLOW)]
    monkeypatch.setattr(report, "diagnose", lambda: iter(findings))
    assert run("doctor").code == 0
    broken = Finding("self-test", "no", Grade.BROKEN)
    monkeypatch.setattr(report, "diagnose", lambda: iter([broken, *findings]))
    code, out, _ = run("doctor")
    assert code == 1
    assert out.splitlines()[:3] == [str(finding) for finding in (broken, *findings)]


def test_who_gets_in_is_told(monkeypatch: pytest.MonkeyPatch, run: Run, tmp_path: Path) -> None:
    monkeypatch.setattr(report, "diagnose", lambda: iter(()))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    out = run("doctor").out
    assert "programs of this machine need no API key" in out
    assert "refused: null, other ports of localhost" in out
    assert "*.localhost, *.local, *.internal" in out
    assert "without an API key" not in out
    monkeypatch.setenv("MLXSERVE_ALLOWED_HOST", "box.example")
    assert "--allowed-host box.example without an API key: whoever reaches" in run("doctor").out
    monkeypatch.setenv("MLXSERVE_API_KEY", "0123456789abcdef")
    out = run("doctor").out
    assert "programs of this machine need an API key" in out
    assert "without an API key" not in out


@pytest.mark.parametrize("grade", [Grade.OK, Grade.BROKEN])
def test_a_report_is_printed_and_written(
    grade: Grade, monkeypatch: pytest.MonkeyPatch, run: Run, tmp_path: Path
) -> None:
    finding, figure = Finding("ops", "x", grade), Measurement("decode", "GB/s", absent="no Metal")
    asked: list[str] = []

    def measure(model: str) -> list[Measurement]:
        asked.append(model)
        return [figure]

    monkeypatch.setattr(report, "diagnose", lambda: iter([finding]))
    monkeypatch.setattr(figures, "measure", measure)
    monkeypatch.setattr(figures, "chosen", lambda _model: {"pages": 7})
    file = tmp_path / "report.json"
    code, out, _ = run("doctor", "--report", str(file), "--model", "some/model")
    assert code == (1 if grade is Grade.BROKEN else 0)
    assert out.splitlines()[:2] == [str(finding), str(figure)]
    assert asked == ["some/model"]
    written = json.loads(file.read_text(encoding="utf-8"))
    assert written["is_complete"]
    assert (len(written["findings"]), len(written["figures"])) == (1, 1)


def test_a_report_that_cannot_be_written_is_refused_at_once(run: Run, tmp_path: Path) -> None:
    code, out, err = run("doctor", "--report", str(tmp_path / "missing" / "report.json"))
    assert (code, out) == (1, "")
    assert "Name a file in a folder that exists" in err


def test_a_model_without_a_report_is_a_mistake(run: Run) -> None:
    code, _, err = run("doctor", "--model", "some/model")
    assert code == 1
    assert "Add --report" in err


def test_a_section_of_the_command_that_fails_is_a_line(
    monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    def fail() -> None:
        raise RuntimeError("launchctl says no\nmore")

    monkeypatch.setattr(report, "diagnose", lambda: iter(()))
    monkeypatch.setattr(choice, "service_manager", fail)
    code, out, err = run("doctor")
    assert code == 1
    assert out.splitlines()[-1] == str(
        Finding("service", "RuntimeError: launchctl says no", Grade.BROKEN)
    )
    assert "Traceback" not in err


def test_a_disk_that_is_full_is_said_in_one_line(
    monkeypatch: pytest.MonkeyPatch, run: Run, tmp_path: Path
) -> None:
    def full(_model: str) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(bench, "model_folder", full)
    code, _, err = run("doctor", "--report", str(tmp_path / "report.json"))
    assert code == 1
    assert "No space left on device" in err
    assert "Traceback" not in err


@pytest.mark.instruments
def test_a_real_report_is_complete_and_names_nobody(
    model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    """The command in a process of its own, with its children, on a model in the home folder."""
    home = tmp_path / "Users" / "ada"
    shutil.copytree(model_folder("qwen3"), home / "model")
    file = home / "report.json"
    done = subprocess.run(
        [sys.executable, "-m", "mlxserve", "doctor", "--report", file, "--model", home / "model"],
        env={**os.environ, "HOME": str(home), "LOGNAME": "ada", "MLXSERVE_API_KEY": "hunter2"},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert "Traceback" not in done.stdout + done.stderr
    text = file.read_text(encoding="utf-8")
    assert not re.search(r"\bada\b|hunter2", text)
    written = json.loads(text)
    assert written["is_complete"]
    assert written["model"] == "~/model"
    assert {finding["name"] for finding in written["findings"]} >= {"mlx", "matmul", "self-test"}
    for figure in written["figures"]:
        assert figure["absent"] or figure["ours"] is not None, figure
    [decode] = [one for one in written["figures"] if one["name"] == "decode of one answer"]
    assert decode["ours"] > 0
    assert decode["mlx_lm"] > 0
    assert written["chosen"].get("pages", 0) > 2, written["chosen"]


def test_what_has_held_the_loops_of_running_servers_is_told(
    monkeypatch: pytest.MonkeyPatch, run: Run, tmp_path: Path
) -> None:
    monkeypatch.setenv("MLXSERVE_HOME", str(tmp_path))
    monkeypatch.setattr(report, "diagnose", lambda: iter(()))
    with serving(FakeChat()) as server, registered(server.url, ["fake"], needs_key=False):
        assert f"{server.url}: its event loop was held " in run("doctor").out
        held = Blocked(seconds=3.0, longest=2.5, longest_route="GET /x")
        card = held.card()
        monkeypatch.setattr(Blocked, "card", lambda _: card)
        out = run("doctor").out
    assert "held 3.0 s in all, longest 2.50 s by GET /x" in out
    with registered("http://127.0.0.1:1", ["fake"], needs_key=False):
        assert "http://127.0.0.1:1 does not answer" in run("doctor").out

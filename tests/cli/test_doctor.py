"""`mlxserve doctor`: its exit code follows its findings."""

from __future__ import annotations

import pytest

from mlxserve.doctor import report
from mlxserve.doctor.finding import Finding, Grade
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
    assert out.splitlines() == [str(finding) for finding in (broken, *findings)]


def test_a_url_without_security_is_a_mistake(run: Run) -> None:
    code, _, err = run("doctor", "--url", "http://127.0.0.1:1")
    assert code == 1
    assert "Add --security" in err

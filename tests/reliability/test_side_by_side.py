"""No good client's request fails beside hostile ones, and nothing stays behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.reliability.side_by_side import run_side_by_side


@pytest.mark.parametrize(
    "minutes",
    [pytest.param(0.1, marks=pytest.mark.slow), pytest.param(1.5, marks=pytest.mark.long)],
)
def test_good_clients_are_answered_beside_hostile_ones(minutes: float, tmp_path: Path) -> None:
    """Some of the hour of `python -m tests.reliability side-by-side`."""
    report = run_side_by_side(tmp_path, minutes)
    print(report)
    assert not report.alone.failures, str(report)
    assert not report.beside.failures, str(report)
    assert not report.bad_replies, str(report)
    assert report.pages_left == 0
    # How many there are depends on the machine.
    assert report.attacks
    assert report.beside.chats
    first, last = report.beside.memory[0].total, report.beside.memory[-1].total
    assert last < first + (1 << 30), str(report)

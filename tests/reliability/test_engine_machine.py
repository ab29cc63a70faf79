"""Whole engines under random orders of events and faults: nothing wrong is answered, and nothing lost."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.reliability.engine_machine import MODELS, FuzzReport, TinyModels, fuzz, run_episode


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> TinyModels:
    return TinyModels(tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize(
    "name",
    [name if "and" in name else pytest.param(name, marks=pytest.mark.slow) for name in MODELS],
)
def test_a_short_episode_loses_nothing(models: TinyModels, name: str) -> None:
    # Without a disk, whose threads would make the episode another one now and then.
    report = FuzzReport(seed=5)
    run_episode(models, report, num_events=70, names=[name])
    assert report.counts["answers"] > 5, str(report)


@pytest.mark.long
@pytest.mark.parametrize("seed", [100, 200])
def test_episodes_lose_nothing_however_many(seed: int, tmp_path: Path) -> None:
    """Some of the 300,000 steps of `python -m tests.reliability engine`; with ENGINE_MACHINE_STEPS, as many."""
    num_steps = int(os.environ.get("ENGINE_MACHINE_STEPS", "5000"))
    said: list[str] = []
    assert fuzz(tmp_path / "report.json", seed, num_steps, said.append), said[-1]


def test_a_run_that_was_stopped_goes_on(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    report = FuzzReport(seed=3, num_steps=50)
    report.counts["answers"] = 7
    report.write(file)
    assert FuzzReport.read(file, seed=1) == report
    assert fuzz(file, 1, 50, print), "nothing is left to do"

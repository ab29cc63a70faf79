"""Recorded steps: a recording holds what the engine did, and a fit recovers the step times."""

from __future__ import annotations

import io
import json
from dataclasses import astuple, replace
from pathlib import Path
from typing import cast

import pytest
from typer.testing import CliRunner

from mlxserve.core.sampling_params import SamplingParams
from mlxserve.engine.engine import Engine
from mlxserve.model.runner import ModelRunner
from mlxserve.request import Chunk, LiveRequest, Request, as_page_table
from tests.perf.cli import app
from tests.perf.simulation import recording
from tests.perf.simulation.comparison import DEFAULTS, simulation
from tests.perf.simulation.costs import ASSUMED, StepWork, fit, read_trace
from tests.perf.simulation.recording import RecordingTimeModel
from tests.perf.simulation.simulator import Simulation, SimulationResult
from tests.perf.simulation.workloads import SCENARIOS


def exact_run() -> Simulation:
    scenario = replace(SCENARIOS["bursty"], num_slots=2)
    settings = replace(DEFAULTS, itl_target_ms=0.0)
    return simulation(scenario, settings, ASSUMED, seed=0, num_requests=12, jumps=False)


def recorded_run(run: Simulation, file: io.TextIOBase) -> SimulationResult:
    """The simulated engine with a pace that records."""
    runner = cast(ModelRunner, run.runner)
    pace = RecordingTimeModel(None, cast("io.TextIOWrapper", file))
    run.engine = Engine(run.scheduler, runner, pace, run.runner.clock)
    return run.run()


def test_a_recorded_engine_is_fitted_to_what_its_steps_cost(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    with path.open("w") as file:
        result = recorded_run(exact_run(), file)
    steps = read_trace(path)
    assert len(steps) == result.num_launched
    found = fit(steps)
    assert astuple(found.model) == pytest.approx(astuple(ASSUMED), rel=1e-6)
    assert found.mean_error < 1e-9


def test_recording_changes_nothing() -> None:
    assert exact_run().run() == recorded_run(exact_run(), io.StringIO())


def test_warm_up_steps_are_not_written() -> None:
    file = io.StringIO()
    pace = RecordingTimeModel(None, file, skip=1)
    request = LiveRequest(Request("a", [1, 2, 3], SamplingParams()))
    request.prefill_end = 3
    chunk = Chunk(request, 0, 2, as_page_table(), samples=False)
    for seconds in (9.0, 1.25):
        pace.observe((chunk,), seconds)
    [line] = file.getvalue().splitlines()
    step = json.loads(line)
    assert step.pop("seconds") == 1.25
    assert StepWork(**step) == StepWork(2, 2.0, 0, 0, 1)


def test_a_real_engine_is_recorded_and_its_steps_are_read_back(tmp_path: Path) -> None:
    file = tmp_path / "steps.jsonl"
    found = recording.record(
        "mlxserve-mini", file, max_context=256, max_num_seqs=2, max_num_batched_tokens=256
    )
    steps = read_trace(file)
    assert found.num_fitted + found.num_held_out == len(steps)
    assert max(step.work.decodes for step in steps) > 1
    assert max(step.work.prefill for step in steps) > 64


@pytest.mark.instruments
def test_simulate_records_a_model_and_reuses_the_recording(tmp_path: Path) -> None:
    file = tmp_path / "steps.jsonl"
    command = f"simulate --workload bursty --requests 10 --seeds 2 --option page_size --fit {file}"
    recorded = CliRunner().invoke(app, f"{command} --model mlxserve-mini")
    assert recorded.exit_code == 0, recorded.output
    assert len(read_trace(file)) > 100
    reused = CliRunner().invoke(app, command)
    assert reused.exit_code == 0, reused.output
    first_lines = [result.output.splitlines()[0] for result in (recorded, reused)]
    assert first_lines[0] == first_lines[1]
    assert first_lines[0].startswith("Step times fitted to")

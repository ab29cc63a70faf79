"""Recorded steps: what the recorder writes is what the engine did, and a fit finds it again."""

from __future__ import annotations

import io
import json
from dataclasses import astuple, replace
from pathlib import Path
from typing import cast

import pytest

from mlxserve.bench.comparison import DEFAULTS, simulation
from mlxserve.bench.costs import ASSUMED, StepWork, fit, read_trace
from mlxserve.bench.simulator import Simulation
from mlxserve.bench.trace import RecordingRunner, StepTrace, record_steps
from mlxserve.bench.workloads import SCENARIOS
from mlxserve.model.runner import ModelRunner, Pending
from mlxserve.request import Chunk, Request, Sampled, SamplingParams, as_page_table


def exact_run() -> Simulation:
    scenario = replace(SCENARIOS["bursty"], num_slots=2)
    return simulation(scenario, DEFAULTS, ASSUMED, seed=0, num_requests=12, jumps=False)


def test_a_recorded_engine_is_fitted_to_what_its_steps_cost(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    run = exact_run()
    with file.open("w") as out:
        trace = StepTrace(out)
        runner = cast(ModelRunner, run.runner)
        run.engine._runner = cast(ModelRunner, RecordingRunner(runner, trace, run.runner.clock))
        result = run.run()
    assert trace.num_steps == result.num_launched
    found = fit(read_trace(file))
    assert astuple(found.model) == pytest.approx(astuple(ASSUMED), rel=1e-6)
    assert found.mean_error < 1e-9


def test_recording_changes_nothing() -> None:
    plain, recorded = exact_run(), exact_run()
    record_steps(recorded.engine, StepTrace(io.StringIO()))
    assert plain.run() == recorded.run()


class Device:
    """A runner and a clock: its steps take a second each, one after the other."""

    def __init__(self) -> None:
        self.now = 0.0

    def launch(self, chunks: tuple[Chunk, ...], previous: object) -> Pending:
        return Pending(tuple(chunks), (), None, cast("object", None))  # type: ignore[arg-type]

    def start(self, pending: Pending) -> None:
        pass

    def collect(self, pending: Pending) -> list[Sampled | None]:
        self.now += 1.0
        return [None] * len(pending.chunks)


def test_a_step_is_timed_from_its_start_or_the_end_of_the_one_before() -> None:
    device, out = Device(), io.StringIO()
    runner = RecordingRunner(cast(ModelRunner, device), StepTrace(out), lambda: device.now, skip=1)
    request = Request("a", [1, 2, 3], SamplingParams())
    request.prefill_end = 3
    chunk = Chunk(request, 0, 2, as_page_table(), samples=False)
    for idle in (0.0, 0.0, 5.0):
        device.now += idle  # nothing runs
        pending = runner.launch((chunk,))
        runner.start(pending)
        device.now += 0.25
        runner.collect(pending)
    steps = [json.loads(line) for line in out.getvalue().splitlines()]
    assert [step.pop("seconds") for step in steps] == [1.25, 1.25]  # the first one is skipped
    assert StepWork(**steps[0]) == StepWork(2, 2.0, 0, 0, 1)

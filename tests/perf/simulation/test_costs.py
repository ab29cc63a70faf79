"""The cost model: a step's work, and coefficients recovered from recorded steps."""

from __future__ import annotations

import json
import random
from dataclasses import asdict, astuple
from pathlib import Path

import pytest

from mlxserve.core.errors import InvalidConfig
from mlxserve.core.sampling_params import SamplingParams
from mlxserve.request import Chunk, LiveRequest, Request, as_page_table
from tests.perf.simulation.costs import ASSUMED, CostModel, RecordedStep, StepWork, fit, read_trace

MODEL = CostModel(0.02, 0.001, 2e-8, 0.0015, 3e-7)


def steps(model: CostModel, number: int, noise: float = 0.0) -> list[RecordedStep]:
    draw = random.Random(0)
    recorded = []
    for _ in range(number):
        prefill, decodes = draw.choice([0, 64, 500, 2048]), draw.randrange(1, 32)
        work = StepWork(
            prefill,
            prefill * draw.uniform(0, 20_000),
            decodes,
            decodes * draw.randrange(50_000),
            decodes + 1,
        )
        recorded.append(
            RecordedStep(model.seconds(work) * draw.uniform(1 - noise, 1 + noise), work)
        )
    return recorded


def test_a_fit_recovers_the_coefficients() -> None:
    found = fit(steps(MODEL, 200))
    assert astuple(found.model) == pytest.approx(astuple(MODEL), rel=1e-6)
    assert found.mean_error < 1e-9
    assert abs(found.total_error) < 1e-9
    assert (found.num_fitted, found.num_held_out) == (160, 40)


def test_the_error_is_measured_on_held_out_steps() -> None:
    recorded = steps(MODEL, 200)
    spoilt = [
        RecordedStep(step.seconds * 2, step.work) if index % 5 == 0 else step
        for index, step in enumerate(recorded)
    ]
    found = fit(spoilt)
    assert astuple(found.model) == pytest.approx(astuple(MODEL), rel=1e-6)
    assert found.mean_error == pytest.approx(0.5)
    assert found.total_error == pytest.approx(-0.5)


def test_noise_of_ten_percent_moves_the_prediction_by_less() -> None:
    assert fit(steps(MODEL, 400, noise=0.1)).mean_error < 0.1


def test_a_step_that_is_sometimes_three_times_slower_counts_as_its_mean() -> None:
    draw = random.Random(1)
    shaken = [
        RecordedStep(step.seconds * draw.choice([1.0, 3.0]), step.work)
        for step in steps(MODEL, 2000)
    ]
    found = fit(shaken)
    assert found.total_error == pytest.approx(0, abs=0.08)
    for value, true in zip(astuple(found.model), astuple(MODEL), strict=True):
        assert value == pytest.approx(2 * true, rel=0.2)


def test_no_coefficient_is_below_zero() -> None:
    # Steps that get faster with more decodes: plain least squares would fit a negative cost.
    odd = [
        RecordedStep(1.0 - 0.01 * n, StepWork(decodes=n, decode_context=n * n, chunks=n))
        for n in range(1, 41)
    ]
    model = fit(odd).model
    assert min(astuple(model)) >= 0
    assert model.decode == 0
    assert model.step > 0


def test_work_that_was_never_recorded_costs_nothing() -> None:
    decodes = [
        RecordedStep(0.01 + 0.001 * n, StepWork(decodes=n, decode_context=100 * n * n, chunks=n))
        for n in range(1, 31)
    ]
    model = fit(decodes).model
    assert model.prefill == model.prefill_context == 0
    assert model.step == pytest.approx(0.01)


def test_the_position_of_a_chunk_decides_whether_it_is_prefill() -> None:
    request = LiveRequest(Request("a", list(range(100)), SamplingParams()))
    request.prefill_end = 100
    prefill = Chunk(request, 64, 36, as_page_table(), samples=True)
    decode = Chunk(request, 100, 1, as_page_table(), samples=True)
    # A prompt that ends in a single token.
    last = Chunk(request, 99, 1, as_page_table(), samples=True)
    assert StepWork.of([prefill, decode]) == StepWork(36, 36 * 82.0, 1, 100, 2)
    assert StepWork.of([last]) == StepWork(1, 99.5, 0, 0, 1)


def test_a_step_costs_the_sum_of_its_terms() -> None:
    assert ASSUMED.seconds(StepWork()) == ASSUMED.step
    work = StepWork(100, 5000.0, 3, 700, 4)
    assert MODEL.seconds(work) == pytest.approx(0.02 + 0.1 + 1e-4 + 0.0045 + 2.1e-4)


def test_too_few_steps_are_refused() -> None:
    with pytest.raises(InvalidConfig, match="record a longer load"):
        fit(steps(MODEL, 19))


def test_a_recording_is_read_back(tmp_path: Path) -> None:
    recorded = steps(MODEL, 25)
    file = tmp_path / "trace.jsonl"
    lines = [json.dumps({"seconds": s.seconds, **asdict(s.work)}) for s in recorded]
    file.write_text("\n".join(lines) + "\n")
    assert read_trace(file) == recorded


@pytest.mark.parametrize(
    "line",
    [
        "not json",
        "[1]",
        '{"seconds": 1}',
        '{"seconds": 0, "prefill": 0, "prefill_context": 0, "decodes": 1, "decode_context": 1, "chunks": 1}',
        '{"seconds": NaN, "prefill": 0, "prefill_context": 0, "decodes": 1, "decode_context": 1, "chunks": 1}',
        '{"seconds": 1, "prefill": null, "prefill_context": 0, "decodes": 1, "decode_context": 1, "chunks": 1}',
    ],
)
def test_an_invalid_line_is_named(tmp_path: Path, line: str) -> None:
    file = tmp_path / "trace.jsonl"
    good = json.dumps({"seconds": 1.0, **asdict(StepWork(1, 1.0, 1, 1, 1))})
    file.write_text(f"{good}\n{line}\n")
    with pytest.raises(InvalidConfig, match=r"line 2: not a recorded step.*--model MODEL"):
        read_trace(file)

"""Times of an engine's answers: each is there, and a growing cache is part of one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from mlxserve.doctor.answer_times import times
from mlxserve.doctor.figures import TIMES_OF_ANSWERS


def test_every_time_of_the_report_is_measured(model_folder: Callable[[str], Path]) -> None:
    found = times(str(model_folder("qwen3")), idle=0.0)
    assert found.keys() == TIMES_OF_ANSWERS.keys()
    assert all(value > 0 for name, value in found.items() if name != "compile")
    assert found["compile"] < found["load"]

"""After a kill at any moment under load, the next server answers as before and nothing is left."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.reliability.kills import NUM_CLIENTS, kill_again_and_again


@pytest.mark.parametrize(
    "times", [pytest.param(2, marks=pytest.mark.slow), pytest.param(12, marks=pytest.mark.long)]
)
def test_kills_under_load_leave_nothing_and_change_no_answer(
    times: int, write_model: Callable[..., Path], tmp_path: Path
) -> None:
    """A few of the 200 kills of `python -m tests.reliability kills`."""
    model = tmp_path / "model"
    model.mkdir()
    write_model(model, "qwen3", max_position_embeddings=1_000)
    report = kill_again_and_again(tmp_path, model, times)
    assert not report.wrong_answers, str(report)
    assert not report.leftovers, str(report)
    assert report.num_cut == times * NUM_CLIENTS
    assert report.num_events >= times

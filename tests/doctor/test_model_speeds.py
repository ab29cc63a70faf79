"""Figures of a model: ours and mlx-lm's have the same names, and what was chosen has its reasons."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from mlxserve.doctor.model_speeds import chosen, host, ours, theirs

ModelFolder = Callable[[str], Path]
NAMES = {"prefill 16", "prefill 32", "peak 16", "peak 32", "decode"}


@pytest.fixture(scope="module")
def model(model_folder: ModelFolder) -> str:
    return str(model_folder("qwen3"))


def test_our_engine_and_mlx_lm_give_the_same_figures(model: str) -> None:
    mine = ours(model, (16, 32), context=8, answer=4)
    other = theirs(model, (16, 32), context=8, answer=4)
    assert set(mine) == NAMES
    assert set(other) == NAMES | {"host"}
    assert all(value > 0 for value in (*mine.values(), *other.values()))


def test_a_prompt_longer_than_the_context_is_left_out(model: str) -> None:
    """The model's is 512."""
    found = ours(model, (16, 600), context=8, answer=4)
    assert set(found) == NAMES - {"prefill 32", "peak 32"}
    assert "prefill 600" not in theirs(model, (16, 600), context=8, answer=4)


def test_the_host_builds_a_step_in_some_milliseconds(model: str) -> None:
    assert 0 < host(model)["host"] < 1000


def test_what_was_chosen_has_sizes_limits_and_the_log_that_says_why(model: str) -> None:
    found = chosen(model)
    assert found["pages"] > 2
    assert found["page size"] == 32
    assert found["longest context"] == 512
    assert found["MLX_MAX_MB_PER_BUFFER"]
    text = "\n".join(found["log"])
    for reason in ("GiB usable, weights", "GiB planned", "attention by cpu"):
        assert reason in text

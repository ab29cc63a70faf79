"""Every definition of mlx-lm and mlx-vlm that can be built small: served with the library's own greedy tokens,
or refused by the sentence of docs/models.md.
"""

from __future__ import annotations

from typing import Any

import pytest

from mlxserve.core.errors import UnsupportedModel
from tests.model import coverage, small_models
from tests.model.small_models import PAGE_SIZE, PROMPTS, NotBuilt

__all__ = ["ARCHITECTURES", "PAGE_SIZE", "PROMPTS", "build"]

ARCHITECTURES = coverage.rows("mlx-lm")
OF_MLX_VLM = coverage.rows("mlx-vlm")
# Those that most folders have, and one of each way of remembering.
OFTEN_USED = {
    *("llama", "qwen3_moe", "qwen3_5", "gemma4_text", "gpt_oss", "deepseek_v3", "lfm2"),
    *("glm4_moe", "nemotron_h"),
}


def build(name: str) -> tuple[Any, dict[str, Any]]:
    """(a model of mlx-lm with random float32 weights, its config)."""
    return small_models.build(name, ARCHITECTURES[name]["config"])


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in OFTEN_USED else pytest.mark.long)
        for name in sorted(ARCHITECTURES)
    ],
)
def test_greedy_tokens_are_those_of_mlx_lm(name: str) -> None:
    row = ARCHITECTURES[name]
    assert small_models.served("mlx-lm", name, row["config"]) == row["served"]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name == "qwen3_5_text" else pytest.mark.long)
        for name in sorted(OF_MLX_VLM)
    ],
)
def test_greedy_tokens_are_those_of_mlx_vlm_or_it_is_refused(name: str) -> None:
    row = OF_MLX_VLM[name]
    if "served" in row:
        assert small_models.served("mlx-vlm", name, row["config"]) == row["served"]
        return
    with pytest.raises((UnsupportedModel, NotBuilt)) as refused:
        small_models.served("mlx-vlm", name, row["config"])
    assert coverage.reason(name, str(refused.value)) == coverage.reason(name, row["refused"])


@pytest.mark.parametrize("library", list(coverage.FILES))
def test_no_definition_is_left_out_without_a_reason(library: str) -> None:
    known = {name.split(".")[0] for name in coverage.rows(library)}
    assert coverage.definitions_of(library) - known == coverage.LEFT_OUT[library].keys()


def test_the_documentation_lists_what_was_found() -> None:
    """After a change: `python -m tests.model.coverage docs`."""
    assert coverage.PAGE.read_text(encoding="utf-8") == coverage.page()

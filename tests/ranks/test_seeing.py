"""Two ranks answer about images what mlx-vlm does: alone, from the cache, together and after preemptions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.drafting import similar_model
from tests.model.small_vision import answer_of_mlx_vlm, read_whole, write_vision_model
from tests.ranks.seeing import NUM_TOKENS, QUESTIONS, Found, seen_by_ranks


def agree(folder: Path, found: Found) -> None:
    whole = read_whole(folder)
    wanted = [
        list(answer_of_mlx_vlm(folder, whole, *said, num_tokens=NUM_TOKENS)) for said in QUESTIONS
    ]
    assert len({tuple(tokens) for tokens in wanted}) == len(QUESTIONS)
    assert found["alone"] == wanted
    assert found["cached"] == wanted
    assert found["together"] == wanted
    assert found["ranks"] == ["1"]
    assert found["num_cached"] > 64
    assert found["num_preemptions"] > 0
    # Rank 0 keeps what it has encoded.
    assert found["num_encoded"] == 3


@pytest.mark.parametrize(
    ("split", "kind"),
    [
        # Features are added after layers of both ranks.
        pytest.param("pipeline", "qwen3_vl", marks=pytest.mark.slow),
        *(
            pytest.param(split, kind, marks=pytest.mark.ranks)
            for split, kind in (
                (
                    "pipeline",
                    "gemma3",
                ),  # rows of an image see later ones, in layers with windows and without
                ("pipeline", "qwen3_5"),  # states, and one rank without a rotation
                ("tensor", "qwen3_5"),
            )
        ),
    ],
)
def test_two_ranks_see(split: str, kind: str, tmp_path: Path) -> None:
    folder = write_vision_model(tmp_path, kind)
    options: dict[str, Any] = {f"{split}_parallel_size": 2}
    agree(folder, seen_by_ranks(str(folder), **options))


@pytest.mark.ranks
def test_guesses_and_features_of_a_step_reach_all_ranks(tmp_path: Path) -> None:
    """A step may have rows of an image beside a draft that rank 0 guesses: both are sent before the forward."""
    (tmp_path / "model").mkdir()
    folder = write_vision_model(tmp_path / "model", "qwen3_vl")
    draft = similar_model(tmp_path / "draft", folder, noise=0.05)
    found = seen_by_ranks(
        str(folder), pipeline_parallel_size=2, draft_model=str(draft), speculative_tokens=3
    )
    agree(folder, found)
    assert found["num_drafted"] > 0

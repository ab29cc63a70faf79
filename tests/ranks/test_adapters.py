"""Adapters on ranks by layers: each rank has those of its own layers, and answers are mlx-lm's own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.adapters import dense_tokens, write_adapter
from tests.ranks.adapted import NUM_TOKENS, adapted, adapted_on_ranks
from tests.test_adapters import prompts_of

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize("kind", ["llama", "qwen3", "qwen3_moe", "qwen3_next"])
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_by_layers_answer_with_adapters_as_mlx_lm_does(
    size: int, kind: str, model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    folder, prompts = model_folder(kind), prompts_of(3, 40, 70)
    folders = {
        "all": write_adapter(tmp_path / "all", folder, seed=1),
        "embedding": write_adapter(
            tmp_path / "embedding",
            folder,
            seed=2,
            rank=3,
            scale=7.0,
            num_layers=1,
            keys=("self_attn.v_proj", "model.embed_tokens"),
        ),
    }
    places = {name: str(place) for name, place in folders.items()}
    found = adapted_on_ranks(folder, places, prompts, pipeline_parallel_size=size)
    names = [None, *folders]
    right = [
        dense_tokens(folder, name and folders[name], prompts, NUM_TOKENS)  # type: ignore[arg-type]
        for name in names
    ]
    wanted = [list(answers[at]) for at in range(len(prompts)) for answers in right]
    assert found["alone"] == wanted
    assert found["together"] == wanted
    alone = adapted(folder, places, prompts)
    for vector, expected in zip(found["vectors"], alone["vectors"], strict=True):
        assert vector == pytest.approx(expected, abs=2e-3)


def test_an_adapter_of_another_model_is_refused_by_ranks(
    model_folder: Callable[[str], Path], write_model: Callable[..., Path], tmp_path: Path
) -> None:
    (tmp_path / "model").mkdir()
    other = write_model(tmp_path / "model", "llama", hidden_size=128)
    adapter = write_adapter(tmp_path / "adapter", other, seed=1)
    with pytest.raises(AssertionError, match="was trained from another model"):
        adapted_on_ranks(
            model_folder("llama"), {"a": str(adapter)}, [[1, 2]], pipeline_parallel_size=2
        )

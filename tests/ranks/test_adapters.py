"""Adapters on ranks: each has those of its own layers, or its share of all, and answers are mlx-lm's own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests import heads
from tests.adapters import dense_tokens, write_adapter
from tests.ranks.adapted import NUM_TOKENS, adapted, adapted_on_ranks
from tests.test_adapters import prompts_of

pytestmark = pytest.mark.ranks


BY_LAYERS, BY_HEADS = "pipeline_parallel_size", "tensor_parallel_size"
CASES = [
    *(
        (BY_LAYERS, size, kind)
        for size in (2, 3)
        for kind in ("llama", "qwen3", "qwen3_moe", "qwen3_next")
    ),
    *((BY_HEADS, 2, kind) for kind in ("llama", "qwen3", "qwen3_moe", "gpt_oss")),
    (BY_HEADS, 2, "qwen3_5"),
    (BY_HEADS, 4, "llama"),  # of which two have the same heads of keys
]


@pytest.mark.parametrize(("split", "size", "kind"), CASES)
def test_ranks_answer_with_adapters_as_mlx_lm_does(
    split: str, size: int, kind: str, model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    # Of the last one a layer has queries, keys and values beside each other, and is divided within each.
    folder = heads.write(tmp_path / "model", kind) if kind == "qwen3_5" else model_folder(kind)
    prompts = prompts_of(3, 40, 70)
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
    found = adapted_on_ranks(folder, places, prompts, **{split: size})
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


@pytest.mark.parametrize("split", [BY_LAYERS, BY_HEADS])
def test_an_adapter_of_another_model_is_refused_by_ranks(
    split: str,
    model_folder: Callable[[str], Path],
    write_model: Callable[..., Path],
    tmp_path: Path,
) -> None:
    (tmp_path / "model").mkdir()
    other = write_model(tmp_path / "model", "llama", hidden_size=128)
    adapter = write_adapter(tmp_path / "adapter", other, seed=1)
    with pytest.raises(AssertionError, match="was trained from another model"):
        adapted_on_ranks(model_folder("llama"), {"a": str(adapter)}, [[1, 2]], **{split: 2})

"""Several ranks answer what one process does: by heads and by layers, in every way it can be asked."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlxserve.system import machine
from mlxserve.system.machine import free_ports
from tests import heads
from tests.assistants import write_agreeing_pair, write_assistant
from tests.conftest import ARCHITECTURES
from tests.drafting import similar_model
from tests.ranks.workload import Answers, answers, answers_of_ranks, launcher

# Kinds with `shard` in mlx-lm, and kinds whose layers hand on nothing but hidden states.
BY_HEADS = ("llama", "qwen3_moe", "qwen2", "qwen3", "gpt_oss")
# Their layers hand on more than hidden states, or they are served one sequence at a time.
NOT_BY_LAYERS = ("gemma4_text", "rwkv7", "deepseek_v32")
BY_LAYERS = tuple(kind for kind in ARCHITECTURES if kind not in NOT_BY_LAYERS)
# A case takes 15 to 27 CPU seconds: three processes, two of which wait for each other in each layer.
SLOW = {("tensor", "llama")}
CASES = [
    *(("tensor", kind) for kind in BY_HEADS),
    *(("pipeline", kind) for kind in BY_LAYERS),
]

WAYS = ("tensor", "pipeline")

Alone = Callable[[str], Answers]


@pytest.fixture(scope="session")
def alone(model_folder: Callable[[str], Path]) -> Alone:
    """What one process answers, computed once for each kind."""
    found: dict[str, Answers] = {}

    def of(kind: str) -> Answers:
        if kind not in found:
            found[kind] = answers(model_folder(kind))
        return found[kind]

    return of


def same(found: Answers, wanted: Answers, size: int = 2) -> None:
    assert found["ranks"] == [str(rank) for rank in range(1, size)]
    for name, wanted_part in wanted.items():
        if name == "embedding":
            assert found[name] == pytest.approx(wanted_part, abs=2e-3)
        elif name == "logprobs":
            assert found[name][0][0] == wanted_part[0][0]
            assert found[name][0][1] == pytest.approx(wanted_part[0][1], abs=5e-3)
        elif name not in {
            "ranks",
            "num_preemptions",
            "num_swapped",
            "window_pages",
            "drafts",
        }:
            assert found[name] == wanted_part, name
    assert found["num_preemptions"] > 0


@pytest.mark.parametrize(
    ("split", "kind"),
    [
        pytest.param(*case, marks=pytest.mark.slow if case in SLOW else pytest.mark.ranks)
        for case in CASES
    ],
)
def test_two_ranks_answer_what_one_process_does(
    split: str, kind: str, model_folder: Callable[[str], Path], alone: Alone
) -> None:
    options: dict[str, Any] = {f"{split}_parallel_size": 2}
    same(answers_of_ranks(model_folder(kind), **options), alone(kind))


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("split", "kind"), [("pipeline", "llama"), ("tensor", "llama"), ("pipeline", "qwen3_next")]
)
def test_a_draft_model_on_rank_0_changes_no_token(
    split: str, kind: str, model_folder: Callable[[str], Path], tmp_path: Path, alone: Alone
) -> None:
    """It guesses within the step: the other ranks are sent what it guessed before their forward."""
    like = model_folder("llama")  # which has no states, and the same vocabulary
    folder = similar_model(tmp_path / "draft", like, noise=0.05)
    options: dict[str, Any] = {f"{split}_parallel_size": 2}
    found = answers_of_ranks(
        model_folder(kind), drafted=True, draft_model=str(folder), speculative_tokens=3, **options
    )
    same(found, alone(kind))
    num_drafted, num_accepted = found["drafts"]
    assert num_drafted > 300
    assert num_accepted > (0.2 * num_drafted if kind == "llama" else 0)


@pytest.mark.ranks
@pytest.mark.parametrize("split", WAYS)
def test_drafts_from_earlier_text_change_no_token_of_ranks(
    split: str, model_folder: Callable[[str], Path], alone: Alone
) -> None:
    options: dict[str, Any] = {f"{split}_parallel_size": 2, "speculative_tokens": 4}
    found = answers_of_ranks(model_folder("qwen3"), drafted=True, **options)
    same(found, alone("qwen3"))
    assert found["drafts"][1] > 0


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("split", "kind"),
    [
        ("tensor", "glm4_moe"),
        ("tensor", "qwen3_5"),
        # The first ends with attention alone, the second keeps states, and the third's head reads other hidden states.
        ("pipeline", "mimo"),
        ("pipeline", "qwen3_5"),
        ("pipeline", "step3p5"),
    ],
)
def test_a_head_on_rank_0_changes_no_token(split: str, kind: str, tmp_path: Path) -> None:
    """It is found in the model's own files, and tried at load by all ranks."""
    folder = heads.write(tmp_path / "model", kind, noise=0.3)
    options: dict[str, Any] = {f"{split}_parallel_size": 2}
    found = answers_of_ranks(folder, drafted=True, speculative_tokens=3, **options)
    wanted = answers_of_ranks(folder, speculative_tokens=0)
    same(found, wanted)
    num_drafted, num_accepted = found["drafts"]
    assert num_drafted > 300
    assert 0.1 * num_drafted < num_accepted < num_drafted


@pytest.mark.ranks
@pytest.mark.parametrize("split", WAYS)
def test_a_head_that_does_not_fit_is_refused_by_all_ranks(split: str, tmp_path: Path) -> None:
    folder = heads.write(tmp_path / "model", "glm4_moe")
    other = heads.write(tmp_path / "other", "glm4_moe", seed=2)
    options: dict[str, Any] = {f"{split}_parallel_size": 2}
    with pytest.raises(AssertionError, match="does not draft, because"):
        answers_of_ranks(folder, draft_model=str(other), **options)


@pytest.mark.ranks
def test_an_assistant_on_rank_0_changes_no_token_of_a_pipeline(
    write_model: Callable[..., Path], tmp_path: Path
) -> None:
    """The last layers of both types are rank 0's, whose pages it reads."""
    (tmp_path / "model").mkdir()
    like = write_model(tmp_path / "model", "gemma4_text", num_kv_shared_layers=0)
    folder, assistant = write_agreeing_pair(tmp_path, like)
    found = answers_of_ranks(
        folder,
        drafted=True,
        draft_model=str(assistant),
        speculative_tokens=3,
        pipeline_parallel_size=2,
    )
    same(found, answers(folder))
    num_drafted, num_accepted = found["drafts"]
    assert num_drafted > 300
    assert 0.1 * num_drafted < num_accepted < num_drafted


@pytest.mark.ranks
def test_an_assistant_of_another_kind_is_refused_before_ranks_compute(
    model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    assistant = write_assistant(tmp_path / "assistant", model_folder("gemma4_text"))
    with pytest.raises(AssertionError, match="is an assistant of Gemma 4 and reads its keys"):
        answers_of_ranks(model_folder("llama"), draft_model=str(assistant), tensor_parallel_size=2)


@pytest.mark.ranks
@pytest.mark.parametrize("split", WAYS)
def test_ranks_that_mlx_launch_starts_answer_the_same(
    split: str, model_folder: Callable[[str], Path], alone: Alone
) -> None:
    options: dict[str, Any] = {f"{split}_parallel_size": 2, "master_port": free_ports(1)[0]}
    same(answers_of_ranks(model_folder("qwen3"), launcher(2), **options), alone("qwen3"))


@pytest.mark.ranks
@pytest.mark.parametrize("split", WAYS)
def test_ranks_whose_kernels_write_in_place_answer_the_same(
    split: str, write_model: Callable[..., Path], tmp_path: Path
) -> None:
    folder = write_model(tmp_path, "llama", head_dim=64)  # the kernels' smallest
    options: dict[str, Any] = {
        f"{split}_parallel_size": 2,
        "master_port": free_ports(1)[0],
        "emulated": True,
    }
    same(answers_of_ranks(folder, launcher(2), **options), answers(folder))


@pytest.mark.ranks
def test_a_draft_models_kernels_on_rank_0_begin_before_those_of_the_step(
    write_model: Callable[..., Path], tmp_path: Path
) -> None:
    """Both write in place; in a pipeline rank 0's own first collective does not depend on guesses."""
    (tmp_path / "model").mkdir()
    folder = write_model(tmp_path / "model", "llama", head_dim=64)
    draft = similar_model(tmp_path / "draft", folder, noise=0.05)
    options: dict[str, Any] = {
        "pipeline_parallel_size": 2,
        "master_port": free_ports(1)[0],
        "emulated": True,
        "drafted": True,
        "draft_model": str(draft),
        "speculative_tokens": 3,
    }
    found = answers_of_ranks(folder, launcher(2), **options)
    same(found, answers(folder))
    assert found["drafts"][1] > 100


@pytest.mark.ranks
@pytest.mark.parametrize("split", WAYS)
def test_keys_and_values_in_8_bits_are_divided_as_others(
    split: str, model_folder: Callable[[str], Path]
) -> None:
    options: dict[str, Any] = {"kv_cache_dtype": "q8"}
    expected = answers(model_folder("qwen3"), **options)
    same(
        answers_of_ranks(model_folder("qwen3"), **options, **{f"{split}_parallel_size": 2}),
        expected,
    )


@pytest.mark.ranks
@pytest.mark.parametrize("split", WAYS)
def test_layers_with_a_window_have_pages_of_their_own(
    split: str, write_model: Callable[..., Path], tmp_path: Path
) -> None:
    """By layers, one of the ranks has a layer with a window only."""
    folder = write_model(tmp_path, "gpt_oss", sliding_window=24)
    options: dict[str, Any] = {f"{split}_parallel_size": 2}
    found = answers_of_ranks(folder, num_window_pages=12, **options)
    assert found.pop("window_pages") == [12]
    expected = answers(folder, num_window_pages=0)
    assert expected.pop("window_pages") == [0]
    same(found, expected)


@pytest.mark.ranks
@pytest.mark.parametrize("split", WAYS)
def test_four_ranks_answer_the_same(
    split: str, write_model: Callable[..., Path], tmp_path: Path
) -> None:
    """With two heads of keys on four ranks, and five layers: one rank has two."""
    folder = write_model(tmp_path, "llama", num_hidden_layers=5)
    options: dict[str, Any] = {f"{split}_parallel_size": 4}
    same(answers_of_ranks(folder, **options), answers(folder), 4)


@pytest.mark.ranks
@pytest.mark.parametrize("split", WAYS)
def test_a_quantised_model_is_divided_as_it_is(
    split: str, write_model: Callable[..., Path], tmp_path: Path
) -> None:
    import mlx.nn as nn
    from mlx.utils import tree_flatten
    from mlx_lm.utils import load_model

    folder = write_model(tmp_path, "llama", intermediate_size=128)
    whole_size = (folder / "model.safetensors").stat().st_size
    model, config = load_model(folder)
    nn.quantize(model, group_size=32, bits=4)
    mx.save_safetensors(
        str(folder / "model.safetensors"),
        dict(tree_flatten(model.parameters())),
        metadata={"format": "mlx"},
    )
    config["quantization"] = {"group_size": 32, "bits": 4}
    (folder / "config.json").write_text(json.dumps(config))
    # So little memory that a CPU keeps the weights as they are.
    share = 0.4 * whole_size / machine.memory().working_set
    options: dict[str, Any] = {f"{split}_parallel_size": 2, "gpu_memory_utilization": share}
    same(answers_of_ranks(folder, **options), answers(folder, gpu_memory_utilization=share))

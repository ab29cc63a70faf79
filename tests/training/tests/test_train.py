"""Training is deterministic and resumable, and mlx-lm computes the same as PyTorch.

These need PyTorch (the `train` extra): `pytest -m train tests/training`.
"""

import csv
import shutil
from itertools import islice
from pathlib import Path

import pytest

from mlxserve.hub.embedded import model_path
from tests.training import curriculum
from tests.training.__main__ import main
from tests.training.abilities import ABILITIES
from tests.training.conversation import Dialogue, Example, Sheet
from tests.training.evaluate import Student, examine
from tests.training.tokenizer import ChatEncoder, load_tokenizer

needs_torch = pytest.mark.train
WHOLE = curriculum.FULL_PLAN[2]


def text_of(example: Example) -> str:
    if isinstance(example, Dialogue):
        return "\n".join(message["content"] for message in example.messages)
    return "\n".join("".join(problem) for problem in example.problems)


def test_a_step_has_the_same_conversations_every_time() -> None:
    first, second = (
        [text_of(made) for made in islice(curriculum.examples(1, 5, WHOLE), 20)] for _ in range(2)
    )
    assert first == second
    assert first != [text_of(made) for made in islice(curriculum.examples(1, 6, WHOLE), 20)]


def test_contexts_grow_from_stage_to_stage() -> None:
    encoder = ChatEncoder(load_tokenizer(model_path()))

    def longest(stage: curriculum.TrainingStage) -> int:
        made = islice(curriculum.examples(1, 0, stage), 60)
        return max(len(encoder.encode(text_of(example))) for example in made)

    foundation, _, whole, long, *_ = curriculum.FULL_PLAN
    assert max(longest(foundation), longest(whole)) < longest(long)


@pytest.mark.parametrize("plan", [curriculum.FULL_PLAN, curriculum.CONTINUED_PLAN])
def test_the_shares_of_the_stages_add_up_to_one(plan: curriculum.TrainingPlan) -> None:
    assert sum(stage.share for stage in plan) == pytest.approx(1)
    assert curriculum.stage_at(plan, 0) is plan[0]
    assert curriculum.stage_at(plan, 1) is plan[-1]


@needs_torch
def test_a_run_can_have_a_single_stage() -> None:
    from tests.training.train import Recipe

    [only] = Recipe(is_continued=True, only_stage="newcomers").plan
    assert (only.name, only.share) == ("newcomers", 1.0)
    assert only.lessons == curriculum.CONTINUED_PLAN[-1].lessons


@needs_torch
def test_a_single_stage_needs_initial_weights() -> None:
    with pytest.raises(SystemExit, match="--stage needs --initial"):
        main(["train", "--stage", "polish", "--steps", "1"])


@needs_torch
def test_only_the_results_on_a_sheet_are_taught() -> None:
    from tests.training.batches import encoded

    encoder = ChatEncoder(load_tokenizer(model_path()))
    sheet = Sheet((("1 + 2 = ", "3"), ("47 + 38 = ", "85")))
    (row,) = encoded(iter([sheet]), encoder, num_tokens=1, max_tokens=100)
    taught = [token for token, mark in zip(row.tokens, row.taught, strict=True) if mark]
    tokenizer = load_tokenizer(model_path())
    text = tokenizer.decode(row.tokens, skip_special_tokens=False)
    assert text == "<|im_start|>assistant\n1 + 2 = 3\n47 + 38 = 85<|im_end|>"
    assert tokenizer.decode(taught, skip_special_tokens=False) == "3\n85<|im_end|>"


@needs_torch
def test_an_interrupted_run_gives_the_weights_of_an_uninterrupted_one(tmp_path: Path) -> None:
    import torch

    from tests.training.network import NetworkShape
    from tests.training.train import SMOKE, Training, train

    def training(name: str) -> Training:
        shape = NetworkShape(2048, hidden_size=64, num_layers=2, num_heads=2, mlp_size=64)
        return Training(SMOKE, shape, model_path(), tmp_path / name)

    whole = training("whole")
    train(whole)
    interrupted = training("parts")
    for _ in range(3):
        interrupted.run_step()
    interrupted.save()
    resumed = training("parts")
    resumed.resume()
    assert resumed.step == 3
    train(resumed)
    assert resumed.num_tokens == whole.num_tokens
    for name, value in whole.network.state_dict().items():
        assert torch.equal(value, resumed.network.state_dict()[name]), name


@needs_torch
def test_a_smoke_run_makes_a_model_that_answers(tmp_path: Path) -> None:
    """The whole pipeline, resumed halfway, takes seconds on two cores."""
    plot, arguments = tmp_path / "loss.png", ["train", "--smoke", "--run-folder", str(tmp_path)]
    assert main([*arguments, "--steps", "10", "--no-export"]) == 0
    assert main([*arguments, "--plot", str(plot)]) == 0
    losses = losses_of(tmp_path / "log.csv")
    assert len(losses) == 24
    assert sum(losses[-4:]) / 4 < sum(losses[:4]) / 4 - 1
    assert plot.stat().st_size > 1000
    with Student(tmp_path / "model", num_pages=40) as student:
        result = examine(ABILITIES[0], 2, seed=0, answer=student)
    assert result.num_prompts == 2


def losses_of(log: Path) -> list[float]:
    with log.open(newline="") as file:
        return [float(row["loss"]) for row in csv.DictReader(file)]


@needs_torch
def test_a_resumed_log_has_every_step_once(tmp_path: Path) -> None:
    arguments = ["train", "--smoke", "--run-folder", str(tmp_path), "--no-export"]
    assert main([*arguments, "--steps", "3"]) == 0
    with (tmp_path / "log.csv").open("a") as file:
        file.write("4,foundation,1.0,1,1\n")  # a step after the last checkpoint
    assert main([*arguments, "--steps", "5"]) == 0
    with (tmp_path / "log.csv").open(newline="") as file:
        assert [int(row["step"]) for row in csv.DictReader(file)] == [1, 2, 3, 4, 5]


@needs_torch
def test_mlx_lm_computes_the_same_logits_as_pytorch(tmp_path: Path) -> None:
    import torch

    from tests.training.export import PARITY_TOLERANCE, export, parity
    from tests.training.network import Network, NetworkShape

    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model_path() / name, tmp_path)
    torch.manual_seed(0)
    network = Network(NetworkShape(2048))
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    export(network, tmp_path)
    assert parity(network, tmp_path) < PARITY_TOLERANCE


@needs_torch
def test_only_taught_tokens_count_in_the_loss() -> None:
    import torch

    from tests.training.network import Network, NetworkShape

    torch.manual_seed(0)
    network = Network(NetworkShape(50, hidden_size=64, num_layers=1, num_heads=1, num_kv_heads=1))
    tokens = torch.randint(0, 50, (2, 6))
    taught = torch.zeros(2, 6, dtype=torch.bool)
    taught[0, 3] = taught[1, 5] = True
    logits = torch.log_softmax(network(tokens), dim=-1)
    expected = -(logits[0, 2, tokens[0, 3]] + logits[1, 4, tokens[1, 5]]) / 2
    assert torch.allclose(network.loss(tokens, taught), expected)


@needs_torch
def test_orthogonal_makes_singular_values_near_one() -> None:
    import torch

    from tests.training.muon import orthogonal

    torch.manual_seed(0)
    for shape in ((2, 8, 24), (2, 24, 8)):
        values = torch.linalg.svdvals(orthogonal(torch.randn(shape)))
        assert values.min() > 0.5
        assert values.max() < 1.5

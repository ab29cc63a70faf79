"""`list` and `show` say of an embedding model what it is for, and short names find repositories."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mlxserve.cli.commands import app
from mlxserve.hub.known_models import repository_of

FILES = {
    "config.json": {
        "model_type": "bert",
        "architectures": ["BertModel"],
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 48,
        "max_position_embeddings": 40,
        "vocab_size": 120,
    },
}


@pytest.fixture
def folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model_folder: Callable[..., Path]
) -> Path:
    """In the folder of models of a home of its own."""
    monkeypatch.setenv("MLXSERVE_HOME", str(tmp_path))
    folder = tmp_path / "models" / "small-bert"
    folder.mkdir(parents=True)
    for name, content in FILES.items():
        (folder / name).write_text(json.dumps(content))
    shutil.copy(model_folder("llama") / "model.safetensors", folder)
    return folder


def ran(*arguments: str) -> str:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    return result.output


def test_list_says_what_a_model_is_for(folder: Path) -> None:
    [line] = [line for line in ran("list").splitlines() if str(folder) in line]
    assert line.endswith("fits (embedding)")
    cards = json.loads(ran("list", "--json"))["models"]
    [card] = [card for card in cards if card["name"] == str(folder)]
    assert (card["purpose"], card["context"]) == ("embedding", 40)
    assert {card["purpose"] for card in cards} == {"embedding", "completion"}


def test_show_says_what_a_model_is_for(folder: Path) -> None:
    assert "Made for      vectors of texts" in ran("show", str(folder))
    assert json.loads(ran("show", str(folder), "--json"))["purpose"] == "embedding"
    config = {**FILES["config.json"], "id2label": {"0": "LABEL_0"}}
    config["architectures"] = ["BertForSequenceClassification"]
    (folder / "config.json").write_text(json.dumps(config))
    assert "Made for      ranking documents" in ran("show", str(folder))


@pytest.mark.parametrize(
    ("name", "repository"),
    [
        ("all-minilm", "sentence-transformers/all-MiniLM-L6-v2"),
        ("Qwen3-Embedding:4B", "Qwen/Qwen3-Embedding-4B"),
        ("bge-reranker-v2-m3", "BAAI/bge-reranker-v2-m3"),
    ],
)
def test_short_names_of_embedding_models(name: str, repository: str) -> None:
    assert repository_of(name) == repository

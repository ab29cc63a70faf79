"""`mlxserve pull`, offline."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mlxserve.hub.known_models import known_models
from tests.cli.commands import Run


def test_a_failed_download_is_reported_as_json(offline: Run) -> None:
    done = offline("pull", "mlx-community/Qwen3-4B-4bit", "--json")
    assert done.code == 1
    lines = [json.loads(line) for line in done.out.splitlines()]
    assert "huggingface.co cannot be reached" in lines[-1]["error"]
    assert done.err == ""


def test_a_model_that_is_here_is_described(offline: Run) -> None:
    done = offline("pull", "mlxserve-mini", "--json")
    last = json.loads(done.out.splitlines()[-1])
    assert (last["name"], last["fits"], last["context"]) == ("mlxserve-mini", True, 4096)
    assert Path(last["path"], "config.json").is_file()
    assert 0 < last["needed"] < last["memory"]


def test_a_short_name_is_pulled_by_its_repository(offline: Run) -> None:
    done = offline("pull", "qwen3:4b")
    assert "mlx-community/Qwen3-4B-4bit is not on this machine" in done.err
    assert "Did you mean qwen3:4b" in offline("pull", "qwen3-4").err


def test_the_repository_of_what_drafts_for_a_model_is_offered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offline: Run
) -> None:
    monkeypatch.setattr("mlxserve.hub.files.fetch_weights", lambda _: None)  # all are here
    drafts = {"Qwen3.5-4B-MLX-4bit": "mlx-community/Qwen3.5-4B-MTP-4bit", "Qwen3-4B-4bit": None}
    for name, draft in drafts.items():
        folder = tmp_path / "hub" / f"models--mlx-community--{name}"
        snapshot = folder / "snapshots" / "1"
        snapshot.mkdir(parents=True)
        (folder / "refs").mkdir()
        (folder / "refs" / "main").write_text("1")
        config = known_models()[f"mlx-community/{name}"].config
        (snapshot / "config.json").write_text(json.dumps(config))
        (snapshot / "model.safetensors").write_bytes(bytes(1000))
        (snapshot / "tokenizer.json").write_text("{}")
        done = offline("pull", f"mlx-community/{name}")
        assert done.code == 0, done.err
        assert (f"`mlxserve pull {draft}` downloads it" in done.out) == (draft is not None)
        assert ("drafts for it" in done.out) == (draft is not None)
        card = json.loads(offline("pull", f"mlx-community/{name}", "--json").out.splitlines()[-1])
        assert card["draft"] == draft

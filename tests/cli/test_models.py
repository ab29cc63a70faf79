"""`mlxserve models`, offline."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.commands import offline


def test_models_are_listed_with_whether_they_fit(tmp_path: Path) -> None:
    done = offline(tmp_path, "models", "--json")
    listed = json.loads(done.out)
    assert listed["context"] is None
    assert listed["models"][0]["context"] == 4096, "the context it was trained for"
    assert listed["models"][0]["name"] == "mlxserve-mini"
    assert listed["models"][0]["fits"] is True
    assert {model["source"] for model in listed["models"]} >= {"bundled", "suggested"}


def test_models_uses_the_context_and_memory_of_a_server_with_the_same_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "config.toml"
    file.write_text("max_model_len = 3000\nport = 9000\n")
    listed = json.loads(offline(tmp_path, "models", "--json", "--config", str(file)).out)
    assert {model["context"] for model in listed["models"]} == {3000}
    monkeypatch.setenv("MLXSERVE_MAX_MODEL_LEN", "2000")
    monkeypatch.setenv("MLXSERVE_CONFIG", str(file))
    half = json.loads(offline(tmp_path, "models", "--json", "--gpu-memory-utilization", "0.45").out)
    assert half["context"] == 2000
    assert half["memory"] == pytest.approx(listed["memory"] / 2, rel=0.01)


def test_adapters_that_the_options_name_are_listed_with_what_is_wrong_with_them(
    tmp_path: Path,
) -> None:
    given = ("--adapter", f"none={tmp_path}")
    [adapter] = json.loads(offline(tmp_path, "models", "--json", *given).out)["adapters"]
    assert (adapter["name"], adapter["folder"]) == ("mlxserve-mini:none", str(tmp_path))
    assert "has no adapter_config.json" in adapter["refusal"]
    assert "mlxserve-mini:none" in offline(tmp_path, "models", *given).out

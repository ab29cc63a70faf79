import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


def mlxserve(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "HF_HUB_CACHE": str(home / "hub"),
        "HF_HUB_OFFLINE": "1",
        "MLXSERVE_HOME": str(home),
    }
    command = [sys.executable, "-m", "mlxserve", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_models_are_listed_with_whether_they_fit(tmp_path: Path) -> None:
    done = mlxserve(tmp_path, "models", "--json")
    said = json.loads(done.stdout)
    assert said["context"] is None
    assert said["models"][0]["context"] == 4096, "its own"
    assert said["models"][0]["name"] == "mlxserve-mini"
    assert said["models"][0]["fits"] is True
    assert {model["source"] for model in said["models"]} >= {"bundled", "suggested"}


def test_models_uses_the_context_and_memory_of_a_server_with_the_same_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "config.toml"
    file.write_text("max_model_len = 3000\nport = 9000\n")
    said = json.loads(mlxserve(tmp_path, "models", "--json", "--config", str(file)).stdout)
    assert {model["context"] for model in said["models"]} == {3000}
    monkeypatch.setenv("MLXSERVE_MAX_MODEL_LEN", "2000")
    monkeypatch.setenv("MLXSERVE_CONFIG", str(file))
    half = json.loads(
        mlxserve(tmp_path, "models", "--json", "--gpu-memory-utilization", "0.45").stdout
    )
    assert half["context"] == 2000
    assert half["memory"] == pytest.approx(said["memory"] / 2, rel=0.01)


def test_a_failed_download_is_reported_as_json(tmp_path: Path) -> None:
    done = mlxserve(tmp_path, "pull", "mlx-community/Qwen3-4B-4bit", "--json")
    assert done.returncode == 1
    said = [json.loads(line) for line in done.stdout.splitlines()]
    assert "cannot be downloaded now" in said[-1]["error"]
    assert done.stderr == ""

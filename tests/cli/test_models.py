import json
import os
import subprocess
import sys
from pathlib import Path


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
    done = mlxserve(tmp_path, "models", "--json", "--context", "1024")
    said = json.loads(done.stdout)
    assert said["context"] == 1024
    assert said["models"][0]["name"] == "mlxserve-mini"
    assert said["models"][0]["fits"] is True
    assert {model["source"] for model in said["models"]} >= {"bundled", "suggested"}


def test_what_can_not_be_downloaded_is_said_to_programs_too(tmp_path: Path) -> None:
    done = mlxserve(tmp_path, "pull", "mlx-community/Qwen3-4B-4bit", "--json")
    assert done.returncode == 1
    said = [json.loads(line) for line in done.stdout.splitlines()]
    assert "cannot be downloaded now" in said[-1]["error"]
    assert done.stderr == ""

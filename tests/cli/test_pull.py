"""`mlxserve pull`, offline."""

from __future__ import annotations

import json
from pathlib import Path

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

"""`mlxserve pull`, offline."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cli.commands import offline


def test_a_failed_download_is_reported_as_json(tmp_path: Path) -> None:
    done = offline(tmp_path, "pull", "mlx-community/Qwen3-4B-4bit", "--json")
    assert done.code == 1
    lines = [json.loads(line) for line in done.out.splitlines()]
    assert "cannot be downloaded now" in lines[-1]["error"]
    assert done.err == ""

"""The measurement of cold prompts: both kinds of models, with the cache and without it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.perf.cli import app


@pytest.mark.slow
def test_prompts_are_cold_for_both_kinds_of_models(tmp_path: Path) -> None:
    file = tmp_path / "cold.json"
    options = [
        "--processes",
        "1",
        "--pairs",
        "1",
        "--prompts",
        "2",
        "--length",
        "70",
        "--tokens",
        "2",
    ]
    result = CliRunner().invoke(app, ["cold", *options, "--json", str(file)])
    assert result.exit_code == 0, result.output
    found = {figure["name"]: figure["values"] for figure in json.loads(file.read_text())["figures"]}
    for kind in ("qwen3", "qwen3_next"):
        [with_cache], [without] = (
            found[f"{kind}: CPU with the cache"],
            found[f"{kind}: CPU without it"],
        )
        assert with_cache > 0
        assert found[f"{kind}: control, relative"][0] > 0
        assert found[f"{kind}: with the cache, relative"] == [pytest.approx(with_cache / without)]

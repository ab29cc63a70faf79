"""The measurement of cold prompts: both kinds of models, with the cache and without it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.perf.cli import app
from tests.perf.cold import GEOMETRIES

SMALL = ("--processes", "1", "--pairs", "1", "--prompts", "2", "--length", "70", "--tokens", "2")


@pytest.mark.instruments
@pytest.mark.parametrize("kind", GEOMETRIES)
def test_prompts_of_a_kind_of_models_are_cold_with_the_cache_and_without_it(
    tmp_path: Path, kind: str
) -> None:
    file = tmp_path / "cold.json"
    result = CliRunner().invoke(app, ["cold", *SMALL, "--kind", kind, "--json", str(file)])
    assert result.exit_code == 0, result.output
    found = {figure["name"]: figure["values"] for figure in json.loads(file.read_text())["figures"]}
    [with_cache], [without] = found[f"{kind}: CPU with the cache"], found[f"{kind}: CPU without it"]
    assert with_cache > 0
    assert found[f"{kind}: control, relative"][0] > 0
    assert found[f"{kind}: with the cache, relative"] == [pytest.approx(with_cache / without)]
    assert {name.split(":")[0] for name in found} == {kind}


def test_a_kind_that_there_is_not_is_refused() -> None:
    result = CliRunner().invoke(app, ["cold", "--kind", "llama"])
    assert result.exit_code == 2
    assert "'llama' is not one of qwen3, qwen3_next" in result.output

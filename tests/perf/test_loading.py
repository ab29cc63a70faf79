"""The measurement of loading: each kind beside a folder for mlx of about as many bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
from mlx_lm.utils import load_model
from typer.testing import CliRunner

from tests.hub.gguf.random_files import write_llama
from tests.perf.cli import app
from tests.perf.loading import INNER, KINDS, WIDTH, seconds_for_a_gb, write_folder

pytestmark = pytest.mark.instruments


def test_both_places_are_loaded_and_timed(tmp_path: Path) -> None:
    file = write_llama(tmp_path / "large.gguf", "Q4_K", 1, WIDTH, INNER)
    folder = write_folder(tmp_path / "mlx", num_layers=1)
    assert file.stat().st_size < (folder / "model.safetensors").stat().st_size
    for place in (file, folder):
        assert min(seconds_for_a_gb(place)) > 0
    model, _ = load_model(folder)
    assert model.layers[0].self_attn.q_proj.weight.shape == (WIDTH, WIDTH)


def test_an_unknown_kind_is_refused_with_those_that_there_are() -> None:
    done = CliRunner().invoke(app, ["loading", "--kind", "Q9"])
    assert done.exit_code == 2
    assert KINDS[0] in done.output


def test_a_round_has_seconds_and_ratios(tmp_path: Path) -> None:
    out = tmp_path / "loading.json"
    command = ["loading", "--kind", "Q8_0", "--megabytes", "1", "--rounds", "1", "--json", str(out)]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    assert '"who": "ratio, wall"' in out.read_text()

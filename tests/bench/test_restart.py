"""A prompt is timed cold, from memory and from disk, on servers that share a folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from mlxserve.bench.restart import bench_restart


@pytest.mark.parametrize(
    "what",
    [
        pytest.param("restart", marks=pytest.mark.long),
        pytest.param("reload", marks=pytest.mark.slow),
    ],
)
def test_the_second_server_finds_what_the_first_computed(
    write_model: Callable[..., Path], tmp_path: Path, what: str
) -> None:
    model = write_model(tmp_path, "llama", max_position_embeddings=4_096)
    report = bench_restart(str(model), pairs=1, num_tokens=600, reloads=what == "reload")
    figures = {figure.name: figure for figure in report.figures}
    assert [len(figure.values) for figure in report.figures] == [1] * 6
    cold, disk = (figures[f"first token {name}"].median for name in ("cold", "from disk"))
    assert figures["cold : from disk"].median == pytest.approx(cold / disk)
    assert figures[f"tokens found after the {what}"].median >= 512

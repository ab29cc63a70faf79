"""`kv-dtype` compares the two dtypes on the same texts."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from mlxserve.core.errors import InvalidConfig
from mlxserve.hub.embedded import MODEL_NAME
from mlxserve.system import machine
from tests.perf.kv_dtype import bench_kv_dtype

pytestmark = pytest.mark.instruments


def test_what_the_model_writes_is_as_probable_in_8_bits() -> None:
    report = bench_kv_dtype(MODEL_NAME, text=None, num_texts=2, context=96, tokens=8)
    figures = {figure.name: figure for figure in report.figures}
    for dtype in ("auto", "q8"):
        assert 1 < figures[f"perplexity, {dtype}"].median < 30, "of the model's own words"
        assert len(figures[f"greedy decode, {dtype}"].values) == 2
    assert all(abs(change) < 3 for change in figures["perplexity, q8 above auto"].values)
    assert figures["same most probable token"].median > 90
    assert all(0 <= length <= 8 for length in figures["greedy tokens until they differ"].values)
    sizes = [figures[f"a token's memory, {d}"].median for d in ("auto", "16 bits", "q8")]
    assert sizes[0] == (1 if machine.is_metal() else 2) * sizes[1]
    assert 1.8 < sizes[1] / sizes[2] < 2
    held = figures["tokens in 1 GiB, q8"].median
    assert math.isclose(held * 1000 * sizes[2], 1 << 20)
    assert report.settings["auto is"] == ("bfloat16" if machine.is_metal() else "float32")


def test_a_text_can_be_given_and_must_be_long_enough(tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text("The boat went out to sea. " * 40, encoding="utf-8")
    report = bench_kv_dtype(MODEL_NAME, text=file, num_texts=2, context=32, tokens=2)
    assert report.settings["text"] == file
    with pytest.raises(InvalidConfig, match=r"need 40000. Lower --texts or --context"):
        bench_kv_dtype(MODEL_NAME, text=file, num_texts=40, context=1000, tokens=2)

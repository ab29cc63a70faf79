"""Decoding is timed next to mlx-lm, on the same prompts, after every answer has started."""

from __future__ import annotations

import pytest

from mlxserve.bench.decode import bench_batch_decode


@pytest.mark.slow
def test_a_batch_runs_on_both_sides_and_ratios_are_of_pairs() -> None:
    report = bench_batch_decode("mlxserve-mini", pairs=2, batch=3, shared=40, own=5, tokens=4)
    ours, theirs, ratio, *of_cpu = report.figures
    assert [figure.name for figure in of_cpu] == [ours.name, theirs.name, ratio.name]
    assert all(value > 0 for figure in report.figures for value in figure.values)
    pairs = zip(ours.values, theirs.values, strict=True)
    assert ratio.values == pytest.approx([mine / other for mine, other in pairs])

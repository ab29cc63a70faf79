"""Attention over plain arrays: written out and fused are one function."""

from __future__ import annotations

import itertools

import mlx.core as mx
import numpy as np
import pytest

from metal_kernels.cpu import attention


def arrays(rows: int, positions: int, dtype: mx.Dtype = mx.float32) -> tuple[mx.array, ...]:
    """Queries of 6 heads, keys and values of 2."""
    shapes = (1, 6, rows, 32), (1, 2, positions, 32), (1, 2, positions, 16)
    return tuple(
        mx.random.normal(shape, key=mx.random.key(index)).astype(dtype)
        for index, shape in enumerate(shapes)
    )


@pytest.mark.parametrize(
    ("rows", "positions", "window", "has_sinks"),
    [
        (rows, positions, window, has_sinks)
        for (rows, positions), window, has_sinks in itertools.product(
            [(1, 1), (1, 90), (7, 7), (7, 90), (64, 90)], [None, 20], [False, True]
        )
    ],
)
def test_written_out_is_what_the_fused_one_gives(
    rows: int, positions: int, window: int | None, has_sinks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if window:  # as the caller cuts what no row sees
        positions = min(positions, rows + window - 1)
    given = arrays(rows, positions)
    sinks = mx.random.normal((6,), key=mx.random.key(9)) if has_sinks else None
    options = {"scale": 0.2, "window": window, "softcap": None, "sinks": sinks}
    monkeypatch.setattr(attention, "_MANY_SCORES", 1 << 30)
    fused = attention.attend(*given, **options)
    monkeypatch.setattr(attention, "_MANY_SCORES", 0)
    written_out = attention.attend(*given, **options)
    assert np.abs(np.array(fused) - np.array(written_out)).max() < 2e-6
    assert not mx.array_equal(fused, written_out) or positions == 1, "both were the same code"


def test_many_scores_are_written_out_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    written_out = attention._written_out
    monkeypatch.setattr(
        attention, "_written_out", lambda *given: calls.append(1) or written_out(*given)
    )
    options = {"scale": 0.2, "window": None, "softcap": None, "sinks": None}
    with mx.stream(mx.cpu):
        attention.attend(*arrays(60, 90), **options)
        assert not calls
        attention.attend(*arrays(61, 90), **options)
        assert len(calls) == (mx.default_device() == mx.cpu)
        attention.attend(*arrays(61, 90, mx.bfloat16), **options)
        assert len(calls) == (mx.default_device() == mx.cpu)


def test_scores_of_any_size_give_numbers() -> None:
    queries, keys, values = arrays(2, 40)
    for factor in (1e4, 1e-6):
        answer = attention._written_out(queries * factor, keys, values, 1.0, None, None, None)
        assert np.isfinite(np.array(answer)).all()

"""What counts as rounding: each head of each row is judged by its own numbers."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from metal_kernels.rounding import TOLERANCES, row_error
from tests.metal_kernels import oracle

UNITS = {mx.float16: 2.0**-11, mx.bfloat16: 2.0**-8, mx.float32: 2.0**-24}


def test_an_error_is_measured_by_its_own_row() -> None:
    """Beside a row that sees one position, half of one that sees 2,000 may be wrong unnoticed."""
    right = np.ones((2, 1, 8))
    right[1] /= 25
    ours = right.copy()
    ours[1, :, :4] *= 0.5
    assert np.abs(ours - right).max() / np.abs(right).max() == pytest.approx(0.02)
    assert row_error(ours, right) == pytest.approx(0.5)
    assert row_error(right, right) == 0
    ours[0, 0, 0] = np.nan
    assert np.isnan(row_error(ours, right))


def test_half_precision_has_four_units() -> None:
    for dtype in (mx.float16, mx.bfloat16):
        assert TOLERANCES[dtype] == oracle.TOLERANCES[dtype] == 4 * UNITS[dtype]
    assert oracle.TOLERANCES[mx.float32] == 64 * UNITS[mx.float32] < TOLERANCES[mx.float32]

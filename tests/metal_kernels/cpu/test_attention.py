"""Attention over plain arrays: what is written out, and what is left to mlx."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from metal_kernels.cpu.attention import MANY_SCORES, attend, attend_fused
from metal_kernels.cpu.written_out import attend_written_out
from tests.metal_kernels.cpu.arrays import arrays


@pytest.mark.parametrize("rows", [11, 12])
def test_many_scores_are_written_out_on_a_cpu(rows: int) -> None:
    given = arrays(rows, 90)
    with mx.stream(mx.cpu):
        found = attend(*given, scale=0.2)
        fused = attend_fused(*given, scale=0.2)
        written_out = attend_written_out(*given, scale=0.2)
    assert not mx.array_equal(fused, written_out)
    is_written_out = mx.default_device() == mx.cpu and 6 * rows * 90 >= MANY_SCORES
    assert mx.array_equal(found, written_out if is_written_out else fused)


def test_many_scores_of_two_bytes_are_fused() -> None:
    given = arrays(61, 90, mx.bfloat16)
    assert mx.array_equal(attend(*given, scale=0.2), attend_fused(*given, scale=0.2))


def test_a_softcap_is_written_out() -> None:
    given = arrays(2, 5)
    found = attend(*given, scale=0.2, softcap=0.5)
    assert mx.array_equal(found, attend_written_out(*given, scale=0.2, softcap=0.5))
    assert not np.allclose(np.array(found), np.array(attend(*given, scale=0.2)), atol=1e-3)

"""Multiply-adds of rows, and the rows that a step may have."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxserve.core.forward_work import ForwardWork, WorkBudget

QWEN3_8B = ForwardWork(6_950_000_000, ((36 * 32 * 2 * 128, None),))
M1 = 1.2e12  # multiply-adds of a second, about
M3_ULTRA = 12e12


def test_a_row_costs_the_weights_and_what_it_sees() -> None:
    forward = ForwardWork(1000, ((10, None), (7, 4)))
    assert [forward.of_row(position) for position in (0, 3, 9)] == [1017, 1068, 1128]
    assert forward.of_chunk(0, 4) == 4 * 1068


def test_a_row_at_64k_costs_almost_four_times_the_first() -> None:
    assert QWEN3_8B.of_row(65_535) / QWEN3_8B.of_row(0) == pytest.approx(3.8, abs=0.1)


def test_a_slow_device_gets_few_rows_in_a_long_context_and_a_fast_one_all() -> None:
    slow, fast = WorkBudget(QWEN3_8B, M1), WorkBudget(QWEN3_8B, M3_ULTRA)
    assert 140 < slow.rows(0, 512, 0) < 180
    assert 30 < slow.rows(65_536, 512, 0) < 60
    assert fast.rows(0, 512, 0) == fast.rows(32_768, 512, 0) == 512


@given(
    start=st.integers(0, 200_000),
    most=st.integers(0, 4096),
    amount=st.floats(0, 1e14),
    used=st.floats(0, 1e14),
)
def test_what_is_granted_fits_into_what_is_left(
    start: int, most: int, amount: float, used: float
) -> None:
    rows = WorkBudget(QWEN3_8B, amount).rows(start, most, used)
    assert 0 <= rows <= most
    assert not rows or used + QWEN3_8B.of_chunk(start, rows) <= amount * (1 + 1e-9)

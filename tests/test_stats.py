"""Rates and histograms by a clock that the test moves."""

from __future__ import annotations

import pytest

from mlxserve.stats import Rate


def test_a_rate_is_that_of_the_last_seconds() -> None:
    rate = Rate()
    for second in range(10):
        rate.add(100.0 + second, 30)
        rate.add(100.5 + second, 30)
    assert rate.per_second(110.0) == pytest.approx(60)
    assert rate.per_second(109.75) == pytest.approx(60, rel=0.07)


def test_a_rate_falls_to_nothing_when_nothing_happens() -> None:
    rate = Rate()
    assert rate.per_second(7.0) == 0
    rate.add(7.0, 100)
    assert rate.per_second(8.0) == rate.per_second(11.0) == 25
    assert rate.per_second(12.0) == 0

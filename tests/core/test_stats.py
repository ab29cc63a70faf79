"""Rates by a clock that the test moves, histograms, and copies of what is still being counted."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from mlxserve.core.stats import Histogram, PoolStats, Rate, StepStats


def test_a_rate_is_that_of_the_last_seconds() -> None:
    rate = Rate()
    for second in range(10):
        rate.add(100.0 + second, 30)
        rate.add(100.5 + second, 30)
    assert rate.per_second(110.0) == pytest.approx(60)
    assert rate.per_second(109.75) == pytest.approx(60)


def test_a_rate_does_not_count_seconds_without_events() -> None:
    rate = Rate()
    assert rate.per_second(7.0) == 0
    rate.add(7.0, 1_100)
    rate.add(8.0, 0)
    assert rate.per_second(7.5) == rate.per_second(8.0) == rate.per_second(11.0) == 1_100
    rate.add(10.0, 900)
    assert rate.per_second(11.0) == 1_000
    assert rate.per_second(12.0) == 900
    assert rate.per_second(15.0) == 0


def test_a_histogram_counts_a_value_under_the_first_bound_that_is_not_below_it() -> None:
    histogram = Histogram((1, 2))
    for value in (0.5, 1, 1.5, 2, 3):
        histogram.observe(value)
    assert histogram.counts == [2, 2, 1]
    assert histogram.total == 8


def test_a_copy_does_not_follow_what_is_counted_later() -> None:
    stats = StepStats()
    before = stats.copy()
    stats.num_steps += 1
    stats.request_success["stop"] += 1
    stats.iteration_tokens.observe(3)
    assert before == StepStats()
    assert stats.copy() == stats != before


def test_a_group_takes_its_owners_attributes_by_name() -> None:
    owner = SimpleNamespace(num_pages=7, num_free=3, num_used=4, other=1)
    values = {name: getattr(owner, name, 0) for name in PoolStats.__match_args__}
    assert PoolStats.from_owner(SimpleNamespace(**values, other=1)) == PoolStats(**values)

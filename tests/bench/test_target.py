"""A target is a number, or a multiple of what another server measured in the same rounds."""

from __future__ import annotations

import pytest

from mlxserve.bench.target import BEST, Target

OTHERS = {"slow": (10.0, 20.0, 60.0), "fast": (4.0, 5.0, 6.0)}


def test_a_number_bounds_the_median() -> None:
    bound = Target(6)
    assert bound.text() == "at most 6"
    assert bound.measured((9.0, 5.0, 6.0), OTHERS) == 6.0
    assert bound.is_met(6.0)
    assert not bound.is_met(6.1)


def test_a_floor_is_the_least() -> None:
    bound = Target(2, is_floor=True, baseline="fast")
    assert bound.text() == "at least 2 × fast"
    assert bound.is_met(2.0)
    assert not bound.is_met(1.9)


def test_ratios_are_taken_round_by_round() -> None:
    assert Target(1.0, baseline="slow").measured((5.0, 40.0, 30.0), OTHERS) == 0.5


@pytest.mark.parametrize(("is_floor", "ratio"), [(False, 2.0), (True, 0.5)])
def test_the_best_other_has_the_best_median_for_the_bound(is_floor: bool, ratio: float) -> None:
    bound = Target(1.0, is_floor, BEST)
    assert bound.measured((8.0, 10.0, 12.0), OTHERS) == ratio


@pytest.mark.parametrize("baseline", [BEST, "mlx-lm"])
def test_nothing_is_measured_without_the_baseline(baseline: str) -> None:
    assert Target(1.0, baseline=baseline).measured((1.0,), {}) is None

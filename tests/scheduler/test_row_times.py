"""RowTimes: what a step of some rows takes, from a table and from steps, of which some stall."""

from __future__ import annotations

import random

import pytest

from mlxserve.scheduler.row_times import RowTimes

TABLE = {1: 10.0, 5: 12.0, 13: 36.0, 32: 36.0}


def observed(times: RowTimes, num_rows: int, *seconds: float, longest: int = 0) -> RowTimes:
    for each in seconds:
        times.observe(num_rows, each, longest)
    return times


def test_a_size_that_never_ran_is_read_off_the_table() -> None:
    times = RowTimes(TABLE)
    shapes = [times.shape(rows) for rows in (1, 3, 5, 9, 13, 20, 32, 64)]
    assert shapes == [10, 11, 12, 24, 36, 36, 36, 72]
    assert not times.is_known(1)
    assert times.seconds(1) is None


def test_three_steps_make_a_size_known() -> None:
    times = observed(RowTimes(TABLE), 2, 0.020, 0.020)
    assert not times.is_known(2)
    observed(times, 2, 0.020)
    assert times.is_known(2)
    assert times.seconds(2) == pytest.approx(0.020)


def test_a_size_is_partly_known_from_its_first_step_to_its_third() -> None:
    times = RowTimes(TABLE, has_calls=True)
    for longest in (0, 1):
        assert not times.is_partly_known(2, longest)
        for _ in range(2):
            observed(times, 2, 0.020, longest=longest)
            assert times.is_partly_known(2, longest)
        observed(times, 2, 0.020, longest=longest)
        assert not times.is_partly_known(2, longest)


def test_steps_are_as_in_the_table_until_they_take_a_fifth_more() -> None:
    times = RowTimes(TABLE)
    assert times.is_as_in_table(1)
    observed(times, 1, *[10.0] * 9)
    assert times.is_as_in_table(1)
    observed(times, 1, *[11.5] * 12)
    assert times.is_as_in_table(1)
    observed(times, 1, *[13.0] * 12)
    assert not times.is_as_in_table(1)
    assert not times.is_as_in_table(5), "other sizes follow"


def test_other_sizes_follow_from_the_nearest_known_one() -> None:
    """The machine is slower than when the table was measured, for all sizes alike."""
    times = observed(RowTimes(TABLE), 1, 0.020, 0.020, 0.020)
    assert times.shape(5) / times.shape(1) == pytest.approx(1.2)
    observed(times, 13, *[0.040] * 3)  # a size whose price the table has wrong
    assert times.shape(13) / times.shape(1) == pytest.approx(2)
    assert times.shape(32) / times.shape(1) == pytest.approx(2)
    assert times.shape(5) / times.shape(1) == pytest.approx(1.2)


@pytest.mark.parametrize("stalled", [(0,), (3,), (4, 5), (0, 4, 8)])
def test_steps_that_stalled_do_not_count(stalled: tuple[int, ...]) -> None:
    steps = [0.5 if step in stalled else 0.010 for step in range(9)]
    times = observed(RowTimes(TABLE), 1, *steps)
    observed(times, 2, 0.011, 0.011, 0.011)
    assert times.shape(2) / times.shape(1) == pytest.approx(1.1, abs=0.25)


def test_heat_is_common_to_all_sizes_and_follows_within_a_few_steps() -> None:
    """A laptop that throttles makes plain steps slow; steps with drafts have become as slow."""
    times = observed(RowTimes(TABLE), 1, *[0.010] * 9)
    observed(times, 5, *[0.012] * 9)
    observed(times, 1, *[0.015] * 12)
    assert times.seconds(1) == pytest.approx(0.015, rel=0.05)
    assert times.seconds(5) == pytest.approx(0.018, rel=0.1)


def test_a_step_that_stalls_changes_the_heat_little_and_not_for_long() -> None:
    times = observed(RowTimes(TABLE), 1, *[0.010] * 9, 10.0)
    assert times.seconds(1) == pytest.approx(0.010, rel=0.16)
    observed(times, 1, *[0.010] * 5)
    assert times.seconds(1) == pytest.approx(0.010, rel=0.03)


def test_sizes_that_have_not_run_for_long_are_read_off_the_table_again() -> None:
    """They may have run beside other work."""
    times = observed(RowTimes(TABLE), 1, *[0.010] * 3)
    observed(times, 5, *[0.090] * 3, longest=4)
    observed(times, 1, *[0.010] * 900)
    assert times.shape(5) / times.shape(1) == pytest.approx(9, rel=0.3)
    observed(times, 1, *[0.010] * 250)
    assert not times.is_known(5)
    assert times.shape(5) / times.shape(1) == pytest.approx(1.2)
    assert times.is_known(1)


def test_a_draft_model_adds_its_calls_and_prompt_lookup_none() -> None:
    model, lookup = RowTimes(TABLE, has_calls=True), RowTimes(TABLE)
    for times in (model, lookup):
        observed(times, 1, *[0.010] * 3)
        observed(times, 5, *[0.016] * 3, longest=4)  # of which the table says 12
    assert lookup.is_known(5)
    assert not model.is_known(5)
    assert model.is_known(5, longest=4)
    assert model.shape(5, 4) / model.shape(1) == pytest.approx(1.6)
    # A call takes a millisecond, and two rows 10.5.
    assert model.shape(2, 1) / model.shape(1) == pytest.approx(1.15, abs=0.03)
    assert lookup.shape(5, 4) == lookup.shape(5)


def test_steps_with_drafts_are_counted_until_one_without() -> None:
    times = observed(RowTimes(TABLE), 5, 0.1, 0.1, longest=4)
    assert times.num_drafted == 2
    assert observed(times, 1, 0.1).num_drafted == 0


def test_a_clock_that_stands_still_breaks_nothing() -> None:
    times = observed(RowTimes(TABLE), 1, *[0.0] * 12)
    assert times.shape(1) > 0
    assert times.shape(5) > 0


def test_noise_leaves_the_shape() -> None:
    draw = random.Random(1)
    times = RowTimes(TABLE)
    for _ in range(200):
        for rows, seconds in ((1, 0.010), (5, 0.012), (13, 0.036)):
            stalls = 5 if draw.random() < 0.02 else 1
            times.observe(rows, seconds * draw.gauss(1, 0.05) * stalls)
    for rows, ratio in ((5, 1.2), (13, 3.6)):
        assert times.shape(rows) / times.shape(1) == pytest.approx(ratio, rel=0.1)

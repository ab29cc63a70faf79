"""A clock that does not count the time in which the process was paused."""

from __future__ import annotations

import pytest

from mlxserve.system.suspend_clock import SHORTEST_PAUSE, RunningClock


class Time:
    """Seconds that a test sets."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def clock(time: Time) -> RunningClock:
    """Started, with a thread that does not tick by itself."""
    clock = RunningClock(time, tick=1e6)
    clock.start()
    return clock


def run(clock: RunningClock, time: Time, seconds: int) -> None:
    """With a tick for each second."""
    for _ in range(seconds):
        time.seconds += 1.0
        clock.tick()


def test_it_runs_with_the_system_clock_while_it_ticks(clock: RunningClock, time: Time) -> None:
    before = clock.now()
    run(clock, time, 10)
    time.seconds += 0.5
    assert clock.now() - before == 10.5
    assert not clock.was_paused(1000.0)


@pytest.mark.parametrize("seconds", [SHORTEST_PAUSE + 0.1, 40.0, 86_400.0])
def test_a_pause_is_not_counted_whoever_runs_first_after_it(
    seconds: float, clock: RunningClock, time: Time
) -> None:
    before = clock.now()
    for first in (clock.now, clock.tick, lambda: clock.was_paused(1.0)):
        run(clock, time, 3)
        time.seconds += seconds
        first()
    assert clock.now() - before == 9.0


def test_it_says_whether_a_pause_lies_within_a_measurement(clock: RunningClock, time: Time) -> None:
    time.seconds += 40.0
    assert clock.was_paused(40.0)
    run(clock, time, 5)
    assert clock.was_paused(5.0)
    assert not clock.was_paused(4.9)


def test_a_thread_that_is_late_on_a_busy_machine_is_no_pause(
    clock: RunningClock, time: Time
) -> None:
    before = clock.now()
    time.seconds += SHORTEST_PAUSE
    clock.tick()
    assert clock.now() - before == SHORTEST_PAUSE
    assert not clock.was_paused(1000.0)


def test_without_its_ticks_it_is_the_system_clock(time: Time) -> None:
    clock = RunningClock(time)
    before = clock.now()
    time.seconds += 40.0
    clock.tick()
    assert clock.now() - before == 40.0
    assert not clock.was_paused(1000.0)

"""A job that is not wanted any more is killed, if it takes long."""

from __future__ import annotations

import threading

import pytest

from mlxserve.helpers.errors import HelperKilled, KillReason
from mlxserve.helpers.helper import Helper
from mlxserve.helpers.waiting import while_wanted

WORKER = "tests.helpers.workers:Worker"


def test_a_long_job_that_is_not_wanted_is_killed_and_the_next_runs() -> None:
    helper = Helper(WORKER, name="the tests", memory=1 << 30)
    has_left = threading.Event()
    threading.Timer(0.5, has_left.set).start()
    with while_wanted(lambda: not has_left.is_set()), pytest.raises(HelperKilled) as caught:
        helper.call("loop", seconds=60)
    assert caught.value.reason is KillReason.LEFT
    assert helper.call("echo", 1, seconds=60) == 1
    helper.close()


def test_a_short_job_ends_as_usual(monkeypatch: pytest.MonkeyPatch) -> None:
    """Killing it would cost the next one the start of a process."""
    monkeypatch.setattr("mlxserve.helpers.job.KILLED_AFTER_SECONDS", 60.0)
    helper = Helper(WORKER, name="the tests", memory=1 << 30)
    assert helper.call("echo", 1, seconds=60) == 1
    with while_wanted(lambda: False):
        assert helper.call("echo", 2, seconds=60) == 2
    assert helper.num_started == 1
    helper.close()

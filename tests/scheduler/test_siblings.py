from __future__ import annotations

import pytest

from mlxserve.request import Request
from mlxserve.sampling_params import SamplingParams
from mlxserve.scheduler.siblings import Siblings
from mlxserve.stats import SchedulerStats

HASHES = [bytes([n]) * 16 for n in range(8)]


def request(name: str) -> Request:
    return Request(name, [1] * 32, SamplingParams(), page_hashes=list(HASHES), prefill_end=32)


@pytest.fixture
def stats() -> SchedulerStats:
    return SchedulerStats()


@pytest.fixture
def siblings(stats: SchedulerStats) -> Siblings:
    siblings = Siblings(4, stats)
    siblings.lead(request("leader"), HASHES)
    return siblings


def test_whoever_misses_four_pages_that_another_computes_waits(
    siblings: Siblings, stats: SchedulerStats
) -> None:
    assert siblings.must_wait(request("a"), HASHES[:4])
    assert not siblings.must_wait(request("b"), HASHES[:3])
    assert stats.prefix_follow_waits == 1


def test_how_many_pages_are_worth_waiting_for_is_an_option() -> None:
    for enough in (1, 4, 5):
        siblings = Siblings(enough, SchedulerStats())
        siblings.lead(request("leader"), HASHES)
        assert siblings.must_wait(request("a"), HASHES[:4]) == (enough <= 4)


def test_the_first_missing_page_decides(siblings: Siblings) -> None:
    assert not siblings.must_wait(request("a"), [b"other", *HASHES])
    assert not siblings.must_wait(request("a"), [*HASHES[:3], b"other"])
    assert siblings.must_wait(request("a"), [*HASHES[:4], b"other"])


def test_a_follower_waits_for_the_whole_run_and_counts_once(
    siblings: Siblings, stats: SchedulerStats
) -> None:
    follower = request("a")
    for passed in range(8):
        assert siblings.must_wait(follower, HASHES[passed:])
        siblings.pass_by(HASHES[passed])
    assert not siblings.must_wait(follower, [])
    assert stats.prefix_follow_waits == 1


def test_a_follower_wakes_when_its_leader_leaves() -> None:
    siblings, leader, follower = Siblings(4, SchedulerStats()), request("leader"), request("a")
    siblings.lead(leader, HASHES)
    assert siblings.must_wait(follower, HASHES)
    siblings.leave(leader)
    assert not siblings.must_wait(follower, HASHES)


def test_the_first_leader_stays_the_leader() -> None:
    siblings, first, second = Siblings(4, SchedulerStats()), request("first"), request("second")
    siblings.lead(first, HASHES[:4])
    siblings.lead(second, HASHES)
    siblings.leave(second)
    assert siblings.must_wait(request("a"), HASHES)
    siblings.leave(first)
    assert not siblings.must_wait(request("a"), HASHES)


def test_an_audit_finds_a_leader_that_does_not_run(siblings: Siblings) -> None:
    with pytest.raises(AssertionError, match="not running"):
        siblings.check([], [])


def test_an_audit_finds_a_leader_that_is_done() -> None:
    siblings, leader = Siblings(4, SchedulerStats()), request("leader")
    siblings.lead(leader, HASHES)
    siblings.check([leader], [])
    leader.num_computed = 32
    with pytest.raises(AssertionError, match="nothing left to compute"):
        siblings.check([leader], [])

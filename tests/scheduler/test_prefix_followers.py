from __future__ import annotations

import pytest

from mlxserve.core.sampling_params import SamplingParams
from mlxserve.core.stats import SchedulerStats
from mlxserve.request import LiveRequest, Request
from mlxserve.scheduler.prefix_followers import PrefixFollowers

HASHES = [bytes([n]) * 16 for n in range(8)]


def must_wait(followers: PrefixFollowers, request: LiveRequest, missing: list[bytes]) -> bool:
    """Looked at as admission does: it is parked, or stays in the queue."""
    awaited = followers.awaited(request, missing)
    if awaited is None:
        followers.stay(request)
        return False
    followers.park(request, awaited)
    return True


def request(name: str) -> LiveRequest:
    asked = Request(name, [1] * 32, SamplingParams(), page_hashes=HASHES)
    return LiveRequest(asked, prefill_end=32)


@pytest.fixture
def stats() -> SchedulerStats:
    return SchedulerStats()


@pytest.fixture
def followers(stats: SchedulerStats) -> PrefixFollowers:
    followers = PrefixFollowers(4, stats)
    followers.lead(request("leader"), HASHES)
    return followers


def test_a_request_that_misses_four_pages_being_computed_waits(
    followers: PrefixFollowers, stats: SchedulerStats
) -> None:
    assert must_wait(followers, request("a"), HASHES[:4])
    assert not must_wait(followers, request("b"), HASHES[:3])
    assert stats.prefix_follow_waits == 1


def test_how_many_pages_are_worth_waiting_for_is_an_option() -> None:
    for enough in (1, 4, 5):
        followers = PrefixFollowers(enough, SchedulerStats())
        followers.lead(request("leader"), HASHES)
        assert must_wait(followers, request("a"), HASHES[:4]) == (enough <= 4)


def test_the_first_missing_page_decides(followers: PrefixFollowers) -> None:
    assert not must_wait(followers, request("a"), [b"other", *HASHES])
    assert not must_wait(followers, request("a"), [*HASHES[:3], b"other"])
    assert must_wait(followers, request("a"), [*HASHES[:4], b"other"])


def test_a_follower_is_woken_by_the_last_page_that_is_computed_for_it(
    followers: PrefixFollowers, stats: SchedulerStats
) -> None:
    follower = request("a")
    assert must_wait(followers, follower, [*HASHES[1:6], b"other"])
    for hash_ in HASHES[:5]:
        assert followers.pages_published([hash_]) == []
    assert follower in followers
    assert followers.pages_published(HASHES[5:7]) == [follower]
    assert follower not in followers
    assert not must_wait(followers, follower, [b"other"])
    assert stats.prefix_follow_waits == 1


def test_a_follower_that_was_woken_waits_for_any_number_of_pages_and_counts_once(
    followers: PrefixFollowers, stats: SchedulerStats
) -> None:
    follower, leader = request("a"), request("next")
    assert must_wait(followers, follower, HASHES)
    followers.lead(leader, [b"more"])
    followers.pages_published(HASHES)
    assert must_wait(followers, follower, [b"more", b"other"])
    assert followers.leave(leader) == [follower]
    assert stats.prefix_follow_waits == 1
    assert not must_wait(followers, request("b"), [b"more"])


def test_a_follower_wakes_when_its_leader_leaves() -> None:
    followers, leader = PrefixFollowers(4, SchedulerStats()), request("leader")
    first, second = request("a"), request("b")
    followers.lead(leader, HASHES)
    assert must_wait(followers, first, HASHES)
    assert must_wait(followers, second, HASHES)
    assert list(followers) == [first, second]
    assert followers.leave(leader) == [first, second]
    assert len(followers) == 0
    assert not must_wait(followers, first, HASHES)


def test_a_follower_that_ends_is_not_woken(followers: PrefixFollowers) -> None:
    first, second = request("a"), request("b")
    assert must_wait(followers, first, HASHES)
    assert must_wait(followers, second, HASHES)
    assert followers.leave(first) == []
    assert followers.pages_published(HASHES) == [second]


def test_the_first_leader_stays_the_leader() -> None:
    followers, first, second = (
        PrefixFollowers(4, SchedulerStats()),
        request("first"),
        request("second"),
    )
    followers.lead(first, HASHES[:4])
    followers.lead(second, HASHES)
    followers.leave(second)
    assert must_wait(followers, request("a"), HASHES)
    followers.leave(first)
    assert len(followers) == 0
    assert not must_wait(followers, request("a"), HASHES)


def test_an_audit_finds_a_leader_that_does_not_run(followers: PrefixFollowers) -> None:
    with pytest.raises(AssertionError, match="not running"):
        followers.check([], [])


def test_an_audit_finds_a_leader_that_is_done() -> None:
    followers, leader = PrefixFollowers(4, SchedulerStats()), request("leader")
    followers.lead(leader, HASHES)
    followers.check([leader], [])
    leader.num_computed = 32
    with pytest.raises(AssertionError, match="nothing left to compute"):
        followers.check([leader], [])

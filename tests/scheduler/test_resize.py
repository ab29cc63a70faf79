"""Resizing a pool in use: a larger one keeps everything, a smaller one begins empty, and answers go on.

`GhostEngine.resize` counts on its own whether a resize is to be refused, and forgets what the slots
hold where the pool becomes smaller: every step after it attends over what was computed since.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from mlxserve.config import PreemptionMode
from mlxserve.errors import InvalidParameter, PagesPromised, PrefixQuotaExceeded
from mlxserve.request import RequestState

PREFIX = list(range(100, 118))  # 4 full pages, and 2 tokens


def run_until(engine: object, is_there: Callable[[], bool]) -> None:
    for _ in range(100):
        if is_there():
            return
        engine.step()
    raise AssertionError("the condition never came true")


# ---- refused


def test_less_than_two_pages_are_refused(make_engine: Callable) -> None:
    with pytest.raises(InvalidParameter, match="num_pages: must be between 2 and 16777216, got 1"):
        make_engine().scheduler.resize(1)


def test_a_pool_too_small_for_its_pins_is_refused(make_engine: Callable) -> None:
    engine = make_engine(num_pages=16, max_pinned_fraction=0.5)
    engine.add(PREFIX, 1, pins=True)
    engine.drain()
    with pytest.raises(PrefixQuotaExceeded, match=r"have 5 pages, but of 9 they may have only 4"):
        engine.resize(9)
    engine.resize(10)


def test_a_pool_too_small_for_what_will_be_pinned_is_refused(make_engine: Callable) -> None:
    engine = make_engine(num_pages=16, max_pinned_fraction=0.5)
    engine.add(PREFIX, 1, pins=True)
    with pytest.raises(PrefixQuotaExceeded):
        engine.resize(8)
    engine.drain()


@pytest.mark.parametrize("has_started", [True, False])
def test_a_pool_too_small_for_one_request_alone_is_refused(
    has_started: bool, make_engine: Callable
) -> None:
    engine = make_engine(num_pages=16)
    request = engine.add(list(range(29)), 8)
    if has_started:
        engine.step()
    with pytest.raises(
        PagesPromised,
        match=r"9 pages would leave 36 tokens for .* has (29|30) and was promised 37.*would be cut",
    ):
        engine.resize(9)
    engine.resize(10)
    engine.drain()
    assert len(engine.answers[request.id]) == 8


def test_a_request_that_fills_its_context_does_not_refuse_a_pool_that_holds_the_context(
    make_engine: Callable,
) -> None:
    engine = make_engine(num_pages=16, max_model_len=32)
    request = engine.add(list(range(31)), 8)
    resized = engine.resize(8)
    assert (resized.num_pages, resized.max_model_len, resized.num_preempted) == (8, 32, 0)
    engine.drain()
    assert len(engine.answers[request.id]) == 1, "it ends where the context ends"


# ---- larger


def test_a_larger_pool_admits_longer_and_more_requests(make_engine: Callable) -> None:
    engine = make_engine(num_pages=4, max_model_len=64, max_pinned_fraction=0.5)
    request = engine.add(list(range(10)), None)
    engine.step()
    capacity = engine.scheduler.page_tables.capacity.of
    assert (engine.scheduler.max_model_len, capacity(request)) == (16, 16)
    resized = engine.resize(20)
    assert (resized.num_preempted, resized.num_forgotten) == (0, 0)
    assert (resized.max_model_len, capacity(request)) == (64, 64)
    assert engine.scheduler.max_model_len == 64
    engine.add(PREFIX, 1, pins=True)
    engine.drain()
    assert len(request.token_ids) > 16
    assert engine.scheduler.pool.num_free == 15


# ---- smaller


@pytest.mark.parametrize("mode", PreemptionMode)
def test_running_answers_are_the_same_after_they_lost_their_pages(
    make_engine: Callable, mode: PreemptionMode
) -> None:
    engine = make_engine(num_pages=32, preemption_mode=mode)
    requests = [engine.add([number] * 14, 16) for number in range(4)]
    run_until(engine, lambda: all(r.num_outputs > 1 for r in requests))
    resized = engine.resize(10)
    assert resized.num_preempted == engine.scheduler.stats().num_preemptions == 4
    assert {r.state for r in requests} == {RequestState.WAITING}
    assert all(r.num_outputs > 1 for r in requests), "what was sampled is not lost"
    engine.drain()  # judged by the slots attended, and by the answers
    assert all(len(answer) == 16 for answer in engine.answers.values())


def test_what_is_computed_again_counts_as_recomputed(make_engine: Callable) -> None:
    engine = make_engine(num_pages=32)
    request = engine.add(PREFIX, 8)
    run_until(engine, lambda: request.num_outputs > 2)
    while engine.unread:
        engine.read()
    num_computed = request.num_computed
    engine.resize(10)
    engine.drain()
    assert engine.scheduler.stats().recomputed_tokens == num_computed


def test_cached_pages_are_forgotten_and_found_on_disk(make_engine: Callable) -> None:
    engine = make_engine(num_pages=32)
    engine.add(PREFIX, 1)
    engine.drain()
    engine.clean(100)
    assert engine.resize(10).num_forgotten == 4
    request = engine.add([*PREFIX, 1], 1)
    engine.drain()
    assert (request.num_cached, engine.scheduler.stats().restored_tokens) == (16, 16)


def test_a_named_prefix_is_computed_again_and_found(make_engine: Callable) -> None:
    engine = make_engine(num_pages=32)
    engine.add(PREFIX, 1, pins=True)
    engine.drain()
    engine.resize(10)
    assert engine.scheduler.pool.num_pinned == 0
    engine.drain()
    assert engine.scheduler.pool.num_pinned == 5, "its tail as well"
    request = engine.add([*PREFIX, 1, 2, 3])
    engine.drain()
    assert request.num_cached == 18
    engine.unpin(engine.pinned[0])
    assert engine.scheduler.pool.num_used == 0


def test_a_follower_and_a_fork_do_not_lose_their_answers(make_engine: Callable) -> None:
    engine = make_engine(num_pages=40, max_num_batched_tokens=12, prefix_follow_pages=2)
    leader = engine.add([*range(32)], 4)
    engine.step()
    follower = engine.add([*range(32), 1, 2], 4)
    first, second = engine.fork([*range(50, 70)], 4, 2)
    run_until(engine, lambda: follower in engine.scheduler.roster.followers)
    assert second in engine.scheduler.roster.forks
    engine.resize(12)
    assert not len(engine.scheduler.roster.forks), "each computes its prompt, or what is not cached"
    engine.drain()
    assert len(leader.token_ids) == 36
    assert engine.answers[first.id] == engine.answers[second.id]


def test_a_copy_that_was_not_made_yet_is_not_needed(make_engine: Callable) -> None:
    engine = make_engine(num_pages=32)
    leader = engine.add(PREFIX, 8)
    forks = [engine.add(PREFIX, 8, fork_of=leader) for _ in range(2)]
    run_until(engine, lambda: leader.num_computed >= 18)
    while engine.unread:
        engine.read()
    assert engine.scheduler.pool.ref_count(leader.page_table[4]) == 3, "held for two copies"
    engine.resize(12)
    assert not engine.scheduler.moves.pop_copies()
    engine.drain()
    assert len({tuple(engine.answers[r.id]) for r in (leader, *forks)}) == 1


def test_a_smaller_pool_has_a_smaller_quota(make_engine: Callable) -> None:
    engine = make_engine(num_pages=32, max_pinned_fraction=0.5)
    engine.resize(10)
    with pytest.raises(PrefixQuotaExceeded, match="of the 5"):
        engine.add([1] * 24, 1, pins=True)


def test_a_pool_that_named_prefixes_would_fill_is_refused(make_engine: Callable) -> None:
    """They are computed again in it, each with room for one token more."""
    engine = make_engine(num_pages=3, max_pinned_fraction=1.0)
    engine.add([1] * 2 * engine.scheduler.pool.page_size, 1, pins=True)
    engine.drain()
    with pytest.raises(PrefixQuotaExceeded, match="leave 8 tokens for a named prefix of 8"):
        engine.resize(2)
    engine.audit()
    engine.resize(4)
    engine.resize(3)
    engine.drain()
    assert engine.scheduler.pool.num_pinned == 2


def test_what_limits_the_running_requests_still_does(make_engine: Callable) -> None:
    engine = make_engine(num_pages=32, max_num_batched_tokens=128)
    engine.scheduler.limit_running(1)
    engine.resize(16)
    requests = [engine.add([number] * 20, 2) for number in range(4)]
    engine.step()
    assert [request.state for request in requests].count(RequestState.RUNNING) == 1
    engine.scheduler.limit_running(None)
    engine.drain()


def test_pages_that_are_being_read_from_disk_are_asked_for_again(make_engine: Callable) -> None:
    engine = make_engine(num_pages=40)
    prompt = [*range(100, 122)]
    engine.add(prompt, 1)
    engine.drain()
    engine.clean(100)
    assert engine.reset()
    request = engine.add(prompt, 4)
    engine.launch()
    assert request.loading
    engine.resize(20)
    assert request.loading is None
    engine.drain()
    assert engine.scheduler.stats().restored_tokens == 20


# ---- the same


def test_the_same_size_and_a_larger_one_forget_nothing(make_engine: Callable) -> None:
    engine = make_engine(num_pages=16)
    for number in range(3):
        engine.add([number] * 12, 1)
        engine.drain()
    known = engine.scheduler.pool.num_cached
    for num_pages in (16, 40, 40, 41):
        engine.resize(num_pages)
    assert engine.scheduler.pool.num_cached == known
    for number in range(3):
        assert engine.add([number] * 13, 1) is not None
        engine.drain()
    assert engine.scheduler.stats().prefix_hits == 3 * 12

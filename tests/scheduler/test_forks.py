"""n samples of one prompt: computed once, full pages shared, the tail copied before it is written."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from mlxserve.core.config import PreemptionMode
from mlxserve.core.errors import PromptTooLong, QueueFull
from mlxserve.request import CacheMiss, FinishReason, RequestState

PROMPT = list(range(100, 118))  # 4 full pages, and 2 tokens


def test_four_samples_of_1000_tokens_compute_and_hold_the_prompt_once(
    make_engine: Callable,
) -> None:
    engine = make_engine(
        num_pages=64, page_size=32, max_model_len=2048, max_num_batched_tokens=2048
    )
    leader, *forks = engine.fork(list(range(1000)), 4, 4)
    engine.step()
    engine.step()  # reads the prompt's step: the forks start
    assert engine.num_computed == 1000 + 1  # and the leader decodes
    assert engine.scheduler.pool.num_used == 31 + 1 + 3  # full pages, and a tail for each
    engine.step()
    assert engine.num_copied == 3
    assert engine.num_computed == 1000 + 2 + 3  # the leader's answer, and each fork's last token
    for fork in forks:
        assert fork.page_table[:31] == leader.page_table[:31]
        assert not set(fork.page_table[31:]) & set(leader.page_table[31:])
        assert fork.num_cached == 31 * 32
        assert fork.cache.reason is CacheMiss.BELOW_ONE_PAGE
    engine.drain()
    assert len({tuple(engine.answers[request.id]) for request in (leader, *forks)}) == 1


def test_the_copy_is_of_the_prompt_though_its_leader_writes_on(make_engine: Callable) -> None:
    engine = make_engine()
    leader, fork = engine.fork(PROMPT, 8, 2)
    for _ in range(3):
        engine.step()
    assert fork.page_table[4] != leader.page_table[4]
    engine.drain()  # judged by the slots attended


def test_a_prompt_that_fills_its_pages_shares_all_but_the_last(make_engine: Callable) -> None:
    engine = make_engine()
    leader, fork = engine.fork(PROMPT[:16], 8, 2)
    engine.step()
    engine.step()
    assert fork.page_table[:3] == leader.page_table[:3]
    assert fork.num_cached == 12
    engine.drain()
    assert engine.num_copied == 1


def test_nothing_is_copied_where_the_last_token_begins_a_page(make_engine: Callable) -> None:
    engine = make_engine()
    engine.fork(PROMPT[:17], 4, 3)
    engine.drain()
    assert engine.num_copied == 0
    assert engine.num_computed == 17 + 3 + 2 * (1 + 3)


def test_forks_outlive_a_leader_that_ends_with_its_first_token(make_engine: Callable) -> None:
    engine = make_engine()
    leader, *forks = engine.fork(PROMPT, 1, 3)
    engine.step()
    engine.step()
    assert leader.is_finished
    assert [fork.state for fork in forks] == [RequestState.RUNNING] * 2
    engine.drain()
    assert engine.num_computed == 18 + 2


@pytest.mark.parametrize("steps", [0, 1, 2, 3])
def test_when_the_leader_is_aborted_the_other_forks_continue(
    make_engine: Callable, steps: int
) -> None:
    engine = make_engine(max_num_batched_tokens=8)
    leader, *forks = engine.fork(PROMPT, 4, 3)
    for _ in range(steps):
        engine.step()
    engine.abort(leader.id)
    engine.drain()
    assert [engine.ends[fork.id] for fork in forks] == [FinishReason.LENGTH] * 2
    assert [len(engine.answers[fork.id]) for fork in forks] == [4, 4]
    if steps:  # at least a page was published, and the new leader computed the rest for both
        assert engine.num_computed <= 2 * 18 + 2 * 4


def test_a_fork_is_aborted_before_during_and_after_its_start(make_engine: Callable) -> None:
    engine = make_engine()
    leader, parked, started, running = engine.fork(PROMPT, 6, 4)
    engine.abort(parked.id)
    engine.launch()
    engine.launch()
    engine.read()
    engine.abort(started.id)  # its copy has not been made
    assert engine.scheduler.pool.num_used == 5 + 1
    engine.step()
    engine.abort(running.id)
    engine.drain()
    assert engine.num_copied == 1
    assert engine.ends[leader.id] is FinishReason.LENGTH


def test_a_fork_without_a_page_waits_and_finds_the_prompt_in_the_cache(
    make_engine: Callable,
) -> None:
    engine = make_engine(num_pages=5)
    _, *forks = engine.fork(PROMPT, 2, 2)
    engine.step()
    engine.step()
    assert [fork.state for fork in forks] == [RequestState.WAITING]
    engine.drain()
    assert engine.num_copied == 0
    assert forks[0].num_cached == 16


def test_a_fork_without_a_place_waits(make_engine: Callable) -> None:
    engine = make_engine(max_num_seqs=2)
    engine.fork(PROMPT, 3, 4)
    engine.drain()
    assert engine.num_copied == 1
    assert engine.scheduler.stats().prefix_hits == 16 * 3


@pytest.mark.parametrize("mode", PreemptionMode)
@pytest.mark.parametrize("caching", [True, False])
def test_forks_that_lack_memory_are_preempted_like_others(
    make_engine: Callable, mode: PreemptionMode, caching: bool
) -> None:
    engine = make_engine(num_pages=10, preemption_mode=mode, enable_prefix_caching=caching)
    requests = engine.fork(PROMPT, 14, 4)
    engine.drain()
    assert engine.scheduler.stats().num_preemptions > 0
    assert len({tuple(engine.answers[request.id]) for request in requests}) == 1


def test_without_prefix_caching_forks_still_share(make_engine: Callable) -> None:
    engine = make_engine(enable_prefix_caching=False)
    engine.fork(PROMPT, 4, 3)
    engine.drain()
    assert engine.num_computed == 18 + 3 + 2 * (1 + 3)
    assert engine.scheduler.stats().prefix_hits == 0


def test_a_fork_that_comes_too_late_is_a_request_like_others(make_engine: Callable) -> None:
    engine = make_engine()
    leader = engine.add(PROMPT, 4)
    engine.drain()
    late = engine.add(PROMPT, 4, fork_of=leader)
    engine.drain()
    assert late.num_cached == 16


def test_parked_forks_count_as_waiting(make_engine: Callable) -> None:
    engine = make_engine(max_num_waiting=3)
    engine.fork(PROMPT, 4, 3)
    assert engine.scheduler.stats().num_waiting == 3
    with pytest.raises(QueueFull):
        engine.add([1])
    assert len(engine.scheduler.requests()[1]) == 3
    engine.drain()


def test_a_prompt_that_is_too_long_has_no_forks(make_engine: Callable) -> None:
    engine = make_engine(num_pages=4)
    with pytest.raises(PromptTooLong):
        engine.fork(PROMPT, 4, 3)
    assert not engine.scheduler.has_work


def test_a_forced_reset_forgets_copies_that_were_to_be_made(make_engine: Callable) -> None:
    engine = make_engine()
    engine.fork(PROMPT, 4, 3)
    engine.launch()
    engine.read()
    assert engine.scheduler.pool.num_used == 5 + 2
    assert engine.reset(force=True)
    assert engine.scheduler.pool.num_used == 0
    engine.drain()


@pytest.mark.parametrize(("max_overtakes", "num_overtaking"), [(0, 0), (1, 1), (3, 3), (9, 5)])
def test_forks_overtake_a_request_that_lacks_memory_only_as_often_as_requests_may(
    make_engine: Callable, max_overtakes: int, num_overtaking: int
) -> None:
    engine = make_engine(num_pages=24, max_num_seqs=12, max_overtakes=max_overtakes)
    first = engine.add([1] * 40, 8)
    engine.launch()
    engine.read()
    large = engine.add([2] * 60, 1)  # 15 of 24 pages, of which 13 are free
    samples = engine.fork([3] * 5, 20, 5)
    while not large.has_run:
        engine.step()
        started = [sample for sample in samples if sample.has_run and not large.has_run]
        if started:
            assert large.num_overtaken == len(started) == engine.scheduler.stats().overtakes
            assert len(started) <= num_overtaking
    assert large.num_overtaken == num_overtaking
    assert first.is_finished
    engine.drain()


def test_a_fork_takes_no_page_that_a_prompt_still_needs(make_engine: Callable) -> None:
    engine = make_engine(num_pages=15, max_num_batched_tokens=16, max_model_len=60)
    samples = engine.fork([3] * 6, 30, 3)
    long = engine.add([4] * 48, 1)  # 12 pages, beside 2 of the leader: one is left
    engine.launch()
    engine.read()
    assert long.num_computed == 8
    assert [sample.has_run for sample in samples] == [True, True, False]
    engine.drain()

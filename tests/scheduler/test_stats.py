"""What an option changes can be seen in a counter."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from mlxserve.core.config import PageTail

PROMPT = list(range(1, 10)) * 3  # 6 pages of 4, and 3 tokens


@pytest.mark.parametrize(("enough", "num_waits"), [(1, 2), (6, 2), (7, 0)])
def test_requests_that_do_not_wait_compute_shared_pages_again_and_release_them(
    enough: int, num_waits: int, make_engine: Callable
) -> None:
    engine = make_engine(
        max_num_batched_tokens=128, prefix_follow_pages=enough, page_tail=PageTail.RECOMPUTE
    )
    for _ in range(3):
        engine.add(PROMPT, max_tokens=1)
    engine.drain()
    stats = engine.scheduler.stats()
    assert stats.prefix_follow_waits == num_waits
    assert stats.rebound_pages == (0 if num_waits else 2 * 6)
    assert engine.num_computed == len(PROMPT) + 2 * (3 if num_waits else len(PROMPT))


def test_a_page_that_was_copied_is_counted(make_engine: Callable) -> None:
    engine = make_engine()
    engine.fork(PROMPT, 2, n=3)
    engine.drain()
    assert engine.scheduler.stats().tail_copies == engine.num_copied == 2


@pytest.mark.parametrize("immune_after", [1, 2, 1000])
def test_each_immune_request_is_counted_once(immune_after: int, make_engine: Callable) -> None:
    engine = make_engine(num_pages=12, growth_pages=0, immune_after_preemptions=immune_after)
    for number in range(6):
        engine.add([number] * 6, max_tokens=30)
    engine.drain()
    immune = sum(r.num_preemptions >= immune_after for r in engine.requests.values())
    assert engine.scheduler.stats().num_preemptions > 3
    assert engine.scheduler.stats().immune_requests == immune
    assert (immune > 0) == (immune_after < 1000)


@pytest.mark.parametrize(("hot_after", "num_hot"), [(1, 6), (2, 6), (3, 0)])
def test_pages_found_often_are_hot_until_they_are_evicted(
    hot_after: int, num_hot: int, make_engine: Callable
) -> None:
    engine = make_engine(
        num_pages=16, hot_after_hits=hot_after, max_model_len=64, page_tail=PageTail.RECOMPUTE
    )
    for _ in range(3):
        engine.add(PROMPT, max_tokens=1)
        engine.drain()
    assert engine.scheduler.pool.num_hot == num_hot
    assert engine.scheduler.pool.num_evicted == 0
    engine.add([7] * 60, max_tokens=1)
    engine.drain()
    assert engine.scheduler.pool.num_evicted == 15 - 10


def test_pages_reserved_for_running_requests_are_counted(make_engine: Callable) -> None:
    engine = make_engine(max_num_batched_tokens=16, long_prefill_token_threshold=8)
    engine.add([1] * 40, max_tokens=4)
    engine.launch()
    engine.add([2] * 40, max_tokens=4)
    engine.launch()
    # Of its 10 pages it has four of the step that it had alone, and two of the one it shared.
    assert engine.scheduler.stats().pages_reserved == 10 - 4 - 2


def test_the_budget_of_a_step_is_what_it_might_compute(make_engine: Callable) -> None:
    engine = make_engine(max_num_batched_tokens=32)
    engine.add([1] * 9, max_tokens=9)
    engine.add([2] * 9, max_tokens=9)
    engine.launch(prefill_budget=1)
    assert engine.scheduler.stats().sched_budget_tokens == 32, "there are no decodes"
    engine.add([3] * 30, max_tokens=9)
    engine.launch(prefill_budget=1)
    assert engine.scheduler.stats().sched_budget_tokens == 2 + 4, "two decodes and a page"
    engine.read()
    engine.launch(prefill_budget=9)
    assert engine.scheduler.stats().sched_budget_tokens == 2 + 9
    engine.read()
    engine.launch(prefill_budget=100)
    assert engine.scheduler.stats().sched_budget_tokens == 32
    engine.drain()


def test_a_prompt_that_waits_for_a_page_of_budget_counts_once(make_engine: Callable) -> None:
    engine = make_engine(max_num_batched_tokens=11, num_pages=256)
    long = engine.add([1] * 40, max_tokens=1)
    for number in range(10):
        engine.add([20 + number] * 9, max_tokens=1)
    for _ in range(4):
        assert engine.spans(engine.launch()) == [(long.id, long.num_computed - 8, 8)]
        engine.read()
        assert engine.scheduler.stats().align_deferrals == 10
    engine.drain()


def test_without_prefix_caching_nothing_is_looked_up(make_engine: Callable) -> None:
    engine = make_engine(num_pages=10, enable_prefix_caching=False, growth_pages=0)
    for number in range(3):
        engine.add([number] * 9, max_tokens=16)
    engine.fork([7] * 6, 3, n=2)
    engine.drain()
    stats = engine.scheduler.stats()
    assert stats.prompt_tokens == 3 * 9 + 2 * 6
    assert stats.num_preemptions > 0
    assert (stats.prefix_queries, stats.resumed_queries) == (0, 0)

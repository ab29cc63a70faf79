"""Preemption with the disk: saved pages are read back, and lost ones computed again."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest

from mlxserve.config import PreemptionMode
from mlxserve.request import LiveRequest
from mlxserve.scheduler import swap

SWAP = {"preemption_mode": PreemptionMode.SWAP}


def crowd(engine: object, count: int = 3, prompt: int = 9, answer: int = 16) -> list[LiveRequest]:
    """More requests than the pool has pages for."""
    return [engine.add([number] * prompt, answer) for number in range(count)]


def preempt_one(engine: object) -> LiveRequest:
    """Step until a request is preempted."""
    while True:
        engine.launch()
        for request in engine.requests.values():
            if request.num_preemptions and not request.page_table:
                return request
        engine.read()


def test_three_times_more_demand_than_pages_is_served_in_both_modes(make_engine: Callable) -> None:
    answers, computed = [], []
    for mode in PreemptionMode:
        engine = make_engine(num_pages=8, preemption_mode=mode, enable_prefix_caching=False)
        crowd(engine, count=6, prompt=5, answer=11)
        engine.drain()
        answers.append(engine.answers)
        computed.append(engine.num_computed)
        stats = engine.scheduler.stats()
        assert stats.num_preemptions > 0
        assert (stats.swapped_tokens > 0) == (mode is PreemptionMode.SWAP)
        if mode is PreemptionMode.SWAP:
            assert stats.restored_tokens == stats.swapped_tokens
    assert answers[0] == answers[1]
    assert computed[1] < computed[0]


def test_the_victims_full_pages_are_saved_and_the_warning_names_the_mode(
    make_engine: Callable, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    engine = make_engine(num_pages=8, **SWAP)
    crowd(engine)
    victim = preempt_one(engine)
    assert victim.saved is not None
    assert victim.saved.first == 0
    assert len(victim.saved.hashes) == victim.num_lost // 4
    assert engine.disk[victim.saved.key].keys() == set(range(victim.saved.end))
    assert "is preempted by PreemptionMode.SWAP mode because" in caplog.text
    engine.drain()
    assert (
        engine.scheduler.stats().recomputed_tokens <= 3 * engine.scheduler.stats().num_preemptions
    )


def test_pages_that_others_hold_are_not_saved(make_engine: Callable) -> None:
    engine = make_engine(num_pages=12, **SWAP)
    shared = list(range(100, 116))
    engine.add([*shared, 1], 1)
    engine.drain()
    for number in range(3):
        engine.add([*shared, number, 7], 20)
    victim = preempt_one(engine)
    assert victim.saved is not None
    assert victim.saved.first == 4
    engine.drain()


def test_a_request_that_waits_for_the_disk_holds_its_pages_and_others_continue(
    make_engine: Callable,
) -> None:
    engine = make_engine(num_pages=8, enable_prefix_caching=False, **SWAP)
    crowd(engine)
    victim = preempt_one(engine)
    while not engine.loads:
        while engine.unread:
            engine.read()
        engine.launch()
    assert victim.loading is not None
    assert len(victim.page_table) == len(victim.loading.hashes)
    assert victim not in {chunk.request for chunk in engine.launch()}
    engine.drain()


@pytest.mark.parametrize("at_most", [0, 1])
def test_what_the_disk_lost_is_computed_again(make_engine: Callable, at_most: int) -> None:
    engine = make_engine(num_pages=8, enable_prefix_caching=False, **SWAP)
    crowd(engine)
    victim = preempt_one(engine)
    lost = victim.num_lost
    while not engine.loads:
        while engine.unread:
            engine.read()
        engine.launch()
    engine.finish_load(engine.loads[0], at_most)
    assert victim.num_computed == 4 * at_most
    assert victim.saved is None
    engine.drain()
    assert engine.scheduler.stats().recomputed_tokens >= lost - 4 * at_most


def test_an_abort_while_the_disk_is_read_frees_pages_and_disk(make_engine: Callable) -> None:
    engine = make_engine(num_pages=8, enable_prefix_caching=False, **SWAP)
    crowd(engine)
    victim = preempt_one(engine)
    while not engine.loads:
        while engine.unread:
            engine.read()
        engine.launch()
    (load,) = engine.loads
    engine.abort(victim.id)
    assert not victim.page_table
    assert not engine.scheduler.accepts(load)
    engine.finish_load(load)  # comes too late, and is dropped
    engine.drain()


def test_a_long_run_is_read_in_parts(
    make_engine: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlxserve.scheduler.page_tables.LOAD_PAGES", 2)
    assert swap.LOAD_PAGES > 2
    engine = make_engine(num_pages=16, enable_prefix_caching=False, **SWAP)
    crowd(engine, prompt=21, answer=20)
    sizes = []
    while engine.scheduler.has_work:
        engine.step()
        sizes += [len(load.pages) for load in engine.loads]
    assert sizes
    assert max(sizes) == 2
    assert engine.scheduler.stats().restored_tokens == engine.scheduler.stats().swapped_tokens


def test_what_was_evicted_before_the_saved_pages_is_computed_up_to_them(
    make_engine: Callable,
) -> None:
    engine = make_engine(num_pages=12, **SWAP)
    shared = list(range(100, 108))
    engine.add([*shared, 1], 1)
    engine.drain()
    requests = [engine.add([*shared, number, 7], 26) for number in range(3)]
    victim = preempt_one(engine)
    assert victim.saved is not None
    first = victim.saved.first * 4
    assert first == 8
    for request in requests:
        if request is not victim:
            engine.abort(request.id)
    while engine.unread:
        engine.read()
    assert engine.scheduler.pool.reset()
    (chunk,) = engine.launch()
    assert (chunk.start, chunk.end, chunk.samples) == (0, first, False)
    engine.drain()


def test_a_hit_in_the_pool_comes_before_the_disk(make_engine: Callable) -> None:
    engine = make_engine(num_pages=8, **SWAP)
    requests = crowd(engine)
    victim = preempt_one(engine)
    for request in requests:
        if request is not victim:
            engine.abort(request.id)
    engine.drain()
    stats = engine.scheduler.stats()
    assert stats.resumed_hits > 0
    assert stats.resumed_hits + stats.restored_tokens == victim.num_lost // 4 * 4


@pytest.mark.parametrize("disk_takes", [0, 1])
def test_only_what_the_disk_took_counts_as_swapped(
    make_engine: Callable, caplog: pytest.LogCaptureFixture, disk_takes: int
) -> None:
    caplog.set_level(logging.WARNING)
    engine = make_engine(num_pages=8, enable_prefix_caching=False, **SWAP)
    engine.disk_takes = disk_takes
    crowd(engine)
    victim = preempt_one(engine)
    assert victim.num_lost >= 8
    assert engine.scheduler.stats().swapped_tokens == 4 * disk_takes
    assert (victim.saved is not None) == bool(disk_takes)
    mode = "SWAP" if disk_takes else "RECOMPUTE"
    assert f"is preempted by PreemptionMode.{mode} mode because" in caplog.text
    engine.drain()
    stats = engine.scheduler.stats()
    assert stats.restored_tokens == stats.swapped_tokens
    assert stats.recomputed_tokens > 0


@pytest.mark.parametrize("mode", PreemptionMode)
def test_one_preemption_in_fifty_is_logged_with_the_number_of_all(
    make_engine: Callable, caplog: pytest.LogCaptureFixture, mode: PreemptionMode
) -> None:
    caplog.set_level(logging.WARNING)
    engine = make_engine(num_pages=8, growth_pages=0, preemption_mode=mode)
    while engine.scheduler.stats().num_preemptions <= 101:
        crowd(engine)
        engine.drain()
    lines = [record.message for record in caplog.records if "is preempted" in record.message]
    numbers = [line.rpartition("total_cumulative_preemption_cnt=")[2] for line in lines]
    assert numbers[:3] == ["1", "51", "101"]
    assert len(numbers) == 1 + (engine.scheduler.stats().num_preemptions - 1) // 50

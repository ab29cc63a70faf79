"""Pages on disk: found after those in memory, read, and computed again where they are lost."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from mlxserve.cache.kinds.kind import find
from mlxserve.cache.kinds.state_slots import StateSlots
from mlxserve.cache.kinds.window_pages import WindowPages
from mlxserve.core.config import PreemptionMode
from mlxserve.request import CacheMiss, LiveRequest
from mlxserve.scheduler import disk_pages
from mlxserve.scheduler.disk_pages import Load
from tests.scheduler.conftest import GhostEngine

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


def read_something(engine: object) -> None:
    """Step until a page is being read from disk."""
    while not engine.loads:
        while engine.unread:
            engine.read()
        assert engine.scheduler.has_work, "all is computed"
        engine.launch()


def written(engine: object, token_ids: list[int]) -> None:
    """Have a prompt on disk, and nothing in memory."""
    engine.add(token_ids, 1)
    engine.drain()
    engine.clean(1000)
    assert engine.reset()


def lose(engine: object, load: Load, first: int, num_pages: int = 1000) -> None:
    """The disk loses `num_pages` pages of a load, from page `first` on."""
    for hash_ in load.run.hashes[first : first + num_pages]:
        del engine.disk.pages[hash_]


# ---- preemption


def test_three_times_more_demand_than_pages_is_served_in_both_modes(make_engine: Callable) -> None:
    answers, computed = [], []
    for mode in PreemptionMode:
        engine = make_engine(num_pages=8, preemption_mode=mode)
        crowd(engine, count=6, prompt=5, answer=11)
        engine.drain()
        answers.append(engine.answers)
        computed.append(engine.num_computed)
        stats = engine.scheduler.stats()
        assert stats.num_preemptions > 0
        assert (stats.swapped_tokens > 0) == (mode is PreemptionMode.SWAP)
        assert (stats.restored_tokens > 0) == (mode is PreemptionMode.SWAP)
    assert answers[0] == answers[1]
    assert computed[1] < computed[0]


def test_the_victims_full_pages_are_saved_and_the_warning_names_the_mode(
    make_engine: Callable, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    engine = make_engine(num_pages=8, **SWAP)
    crowd(engine)
    victim = preempt_one(engine)
    assert engine.disk.num_leading(victim.page_hashes) == victim.num_lost // 4
    assert "is preempted by PreemptionMode.SWAP mode because" in caplog.text
    engine.drain()
    stats = engine.scheduler.stats()
    assert stats.recomputed_tokens <= 3 * stats.num_preemptions


def test_pages_that_others_hold_are_not_saved(make_engine: Callable) -> None:
    engine = make_engine(num_pages=12, **SWAP)
    shared = list(range(100, 116))
    engine.add([*shared, 1], 1)
    engine.drain()
    for number in range(3):
        engine.add([*shared, number, 7], 20)
    victim = preempt_one(engine)
    assert not engine.disk.num_leading(victim.page_hashes[:1])
    assert engine.disk.num_leading(victim.page_hashes[4:]) > 0
    engine.drain()


def test_what_is_on_disk_already_is_not_saved_again(make_engine: Callable) -> None:
    engine = make_engine(num_pages=8, **SWAP)
    for number in range(3):
        written(engine, [number] * 9)
    crowd(engine)
    engine.drain()  # the ghost refuses a page that it has
    assert engine.scheduler.stats().swapped_tokens > 0


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


@pytest.mark.parametrize("takes", [0, 1])
def test_only_what_the_disk_took_counts_as_swapped(
    make_engine: Callable, caplog: pytest.LogCaptureFixture, takes: int
) -> None:
    caplog.set_level(logging.WARNING)
    engine = make_engine(num_pages=8, **SWAP)
    engine.disk.takes = takes
    crowd(engine)
    victim = preempt_one(engine)
    assert victim.num_lost >= 8
    assert engine.scheduler.stats().swapped_tokens == 4 * takes
    mode = "SWAP" if takes else "RECOMPUTE"
    assert f"is preempted by PreemptionMode.{mode} mode because" in caplog.text
    engine.drain()
    assert engine.scheduler.stats().recomputed_tokens > 0


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


# ---- reading


def test_a_prompt_on_disk_is_read_but_for_what_fills_no_page(make_engine: Callable) -> None:
    engine = make_engine(num_pages=16)
    prompt = list(range(100, 122))
    written(engine, prompt)
    num_computed = engine.num_computed
    request = engine.add(prompt, 1)
    engine.drain()
    assert engine.num_computed == num_computed + 2
    assert request.num_cached == 20
    assert request.cache is not None
    assert (request.cache.num_tokens, request.cache.num_from_disk) == (20, 20)
    stats = engine.scheduler.stats()
    assert (stats.prefix_hits, stats.restored_tokens, stats.recomputed_tokens) == (20, 20, 0)


def test_pages_on_disk_follow_those_in_memory(make_engine: Callable) -> None:
    engine = make_engine(num_pages=16)
    prompt = list(range(100, 122))
    written(engine, prompt)
    engine.add(prompt[:9], 1)
    engine.drain()
    request = engine.add(prompt, 1)
    engine.drain()
    assert request.cache is not None
    assert (request.cache.num_tokens, request.cache.num_from_disk) == (20, 12)


def test_what_is_computed_faster_is_not_read(make_engine: Callable) -> None:
    engine = make_engine(num_pages=16)
    prompt = list(range(100, 122))
    written(engine, prompt)
    engine.disk.is_fast = False
    request = engine.add(prompt, 1)
    engine.drain()
    assert request.num_cached == 0
    assert engine.scheduler.stats().restored_tokens == 0


def test_a_request_that_skips_the_cache_reads_nothing(make_engine: Callable) -> None:
    engine = make_engine(num_pages=16)
    prompt = list(range(100, 122))
    written(engine, prompt)
    engine.add(prompt, 1, skips_cache=True)
    engine.drain()
    assert engine.scheduler.stats().restored_tokens == 0


def test_another_salt_finds_nothing(make_engine: Callable) -> None:
    engine = make_engine(num_pages=16)
    prompt = list(range(100, 122))
    written(engine, prompt)
    engine.add(prompt, 1, salt=b"other")
    engine.drain()
    assert engine.scheduler.stats().restored_tokens == 0


def test_a_request_that_waits_for_the_disk_holds_its_pages_and_others_continue(
    make_engine: Callable,
) -> None:
    engine = make_engine(num_pages=16)
    prompt = list(range(100, 122))
    written(engine, prompt)
    other = engine.add([7] * 9, 4)
    waiting = engine.add(prompt, 1)
    read_something(engine)
    assert waiting.loading is not None
    assert len(waiting.page_table) == len(waiting.loading.hashes) == 5
    while engine.unread:
        engine.read()
    assert {chunk.request for chunk in engine.launch()} == {other}
    engine.drain()


@pytest.mark.parametrize("at_most", [0, 1])
def test_what_the_disk_lost_is_computed_and_said(make_engine: Callable, at_most: int) -> None:
    engine = make_engine(num_pages=16)
    prompt = list(range(100, 122))
    written(engine, prompt)
    request = engine.add(prompt, 1)
    read_something(engine)
    lose(engine, engine.loads[0], at_most)
    engine.finish_load(engine.loads[0])
    assert request.num_computed == 4 * at_most
    assert not request.disk_end
    engine.drain()
    assert request.cache is not None
    assert request.cache.reason is CacheMiss.LOST
    assert request.cache.differs_at == request.num_cached == 4 * at_most


@pytest.mark.parametrize("first", [0, 2])
def test_pages_after_one_that_was_lost_are_read(make_engine: Callable, first: int) -> None:
    engine = make_engine(num_pages=16)
    prompt = list(range(100, 122))
    written(engine, prompt)
    request = engine.add(prompt, 1)
    read_something(engine)
    lose(engine, engine.loads[0], first, 1)
    engine.drain()
    assert request.cache is not None
    assert request.cache.reason is CacheMiss.LOST
    assert request.cache.num_from_disk == request.num_cached == 4 * 4  # all but one
    assert engine.scheduler.stats().restored_tokens == 4 * 4
    engine.clean(1000)
    assert engine.disk.num_leading(request.page_hashes) == 5  # the lost one was written again


def test_of_several_lost_pages_each_is_computed_and_the_others_are_read(
    make_engine: Callable,
) -> None:
    engine = make_engine(num_pages=32)
    prompt = list(range(100, 134))
    written(engine, prompt)
    request = engine.add(prompt, 1)
    for _ in range(3):
        read_something(engine)
        lose(engine, engine.loads[0], 1, 1)
        engine.finish_load(engine.loads[0])
    engine.drain()
    assert request.num_cached == (8 - 3) * 4


@pytest.mark.parametrize("at_most", [0, 1])
def test_a_victims_pages_that_were_lost_count_as_recomputed(
    make_engine: Callable, at_most: int
) -> None:
    engine = make_engine(num_pages=8, **SWAP)
    requests = crowd(engine)
    victim = preempt_one(engine)
    for request in requests:
        if request is not victim:
            engine.abort(request.id)
    while engine.unread:
        engine.read()
    assert engine.reset()
    read_something(engine)
    before = engine.scheduler.stats().recomputed_tokens
    lose(engine, engine.loads[0], at_most)
    engine.finish_load(engine.loads[0])
    assert victim.num_computed == 4 * at_most
    after = engine.scheduler.stats().recomputed_tokens
    assert after - before == victim.num_lost // 4 * 4 - 4 * at_most
    engine.drain()


def test_an_abort_while_the_disk_is_read_frees_the_pages(make_engine: Callable) -> None:
    engine = make_engine(num_pages=16)
    prompt = list(range(100, 122))
    written(engine, prompt)
    request = engine.add(prompt, 1)
    read_something(engine)
    (load,) = engine.loads
    engine.abort(request.id)
    assert not request.page_table
    assert not load.is_wanted
    engine.finish_load(load)  # comes too late, and is dropped
    engine.drain()


def test_a_long_run_is_read_in_parts(
    make_engine: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlxserve.scheduler.page_tables.LOAD_PAGES", 2)
    assert disk_pages.LOAD_PAGES > 2
    engine = make_engine(num_pages=16)
    prompt = list(range(100, 122))
    written(engine, prompt)
    engine.add(prompt, 1)
    sizes = []
    while engine.scheduler.has_work:
        engine.step()
        sizes += [len(load.pages) for load in engine.loads]
    assert sizes == [2, 2, 1]


def test_a_prompt_that_others_wait_for_is_read_once(make_engine: Callable) -> None:
    engine = make_engine(num_pages=32, prefix_follow_pages=1)
    prompt = list(range(100, 122))
    written(engine, prompt)
    for number in range(3):
        engine.add([*prompt, number], 4)
    engine.drain()
    assert engine.scheduler.stats().restored_tokens == 20


# ---- recurrent states


def test_a_prompt_is_read_up_to_its_last_state(make_engine: Callable) -> None:
    engine = make_engine(num_pages=32, num_state_slots=12)
    prompt = list(range(100, 122))
    written(engine, prompt)
    num_computed = engine.num_computed
    request = engine.add([*prompt, 7, 8, 9], 4)
    engine.drain()
    assert engine.num_computed == num_computed + 5 + 3  # after the 20 that were read
    assert request.cache is not None
    assert (request.cache.num_tokens, request.cache.num_from_disk) == (20, 20)
    assert engine.states.num_restored == 1
    assert find(engine.scheduler.page_tables.ends, StateSlots).stats.num_restored == 1


def test_pages_without_a_state_after_them_are_not_read(make_engine: Callable) -> None:
    engine = make_engine(num_pages=32, num_state_slots=12)
    prompt = list(range(100, 122))
    written(engine, prompt)
    engine.disk.states.clear()
    request = engine.add(prompt, 1)
    engine.drain()
    assert request.num_cached == 0
    assert engine.scheduler.stats().restored_tokens == 0


@pytest.mark.parametrize("lost", ["state", "page"])
def test_without_its_state_everything_is_computed_again(make_engine: Callable, lost: str) -> None:
    engine = make_engine(num_pages=32, num_state_slots=12)
    prompt = list(range(100, 122))
    written(engine, prompt)
    request = engine.add(prompt, 1)
    read_something(engine)
    [load] = engine.loads
    assert load.is_last
    if lost == "state":
        del engine.disk.states[load.run.hashes[-1]]
        engine.finish_load(load)
    else:
        engine.finish_load(load, 3)
    assert request.num_computed == 0
    assert not request.page_table
    engine.drain()
    assert request.cache is not None
    assert request.cache.reason is CacheMiss.LOST
    assert request.num_cached == 0
    assert engine.scheduler.stats().restored_tokens == 0


def test_a_run_in_parts_has_its_state_at_the_end(
    make_engine: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlxserve.scheduler.page_tables.LOAD_PAGES", 2)
    engine = make_engine(num_pages=32, num_state_slots=12)
    prompt = list(range(100, 122))
    written(engine, prompt)
    request = engine.add(prompt, 1)
    parts = []
    while engine.scheduler.has_work:
        engine.step()
        parts += [(len(load.pages), load.is_last) for load in engine.loads]
    assert parts == [(2, False), (2, False), (1, True)]
    assert request.num_cached == 20


def test_what_is_lost_leaves_the_state_in_memory(make_engine: Callable) -> None:
    """The request continues after the pages whose state was never gone."""
    engine = make_engine(num_pages=32, num_state_slots=12)
    prompt = list(range(100, 122))
    written(engine, prompt)
    engine.add(prompt[:9], 1)
    engine.drain()
    request = engine.add(prompt, 1)
    read_something(engine)
    [load] = engine.loads
    assert load.run.first == 2
    engine.finish_load(load, 1)
    assert request.num_computed == 8
    assert len(request.page_table) == 2
    engine.drain()
    assert request.num_cached == 8


def test_states_are_written_once_the_last_used_first(make_engine: Callable) -> None:
    engine = make_engine(num_pages=32, num_state_slots=12)
    old, new = engine.add([1] * 9, 1), engine.add([2] * 9, 1)
    engine.drain()
    _, states = engine.scheduler.moves.kinds
    [(hash_, _)] = engine.scheduler.moves.disk.unwritten(states, 1)
    assert hash_ in {old.page_hashes[1], new.page_hashes[1]}
    engine.clean(1000)
    assert engine.disk.states.keys() >= {old.page_hashes[1], new.page_hashes[1]}
    assert engine.scheduler.moves.disk.unwritten(states, 1000) == []


# ---- writing


def test_pages_are_written_newest_first_while_nothing_runs(make_engine: Callable) -> None:
    engine = make_engine(num_pages=16)
    old, new = engine.add([1] * 9, 1), engine.add([2] * 9, 1)
    engine.drain()
    engine.clean(2)
    assert engine.disk.num_leading(new.page_hashes) == 2
    assert not engine.disk.num_leading(old.page_hashes)
    engine.clean(1000)
    assert engine.disk.num_leading(old.page_hashes) == 2
    assert engine.scheduler.moves.disk.unwritten(engine.scheduler.moves.kinds[0], 1000) == []


def test_named_prefixes_are_written_first(make_engine: Callable) -> None:
    engine = make_engine(num_pages=16)
    prefix = engine.add([1] * 8, 1, pins=True)
    engine.drain()
    engine.add([2] * 9, 1)
    engine.drain()
    engine.clean(2)
    assert engine.disk.num_leading(prefix.page_hashes) == 2


def test_a_tail_is_not_written(make_engine: Callable) -> None:
    engine = make_engine(num_pages=16)
    engine.add([1] * 10, 1, pins=True)
    engine.drain()
    moves = engine.scheduler.moves
    assert len(moves.disk.unwritten(moves.kinds[0], 1000)) == 2


def test_beside_work_only_pages_about_to_be_evicted_are_written(make_engine: Callable) -> None:
    roomy, tight = make_engine(num_pages=200), make_engine(num_pages=16)
    for engine in (roomy, tight):
        engine.add([1] * 9, 1)
        engine.drain()
    assert roomy.scheduler.moves.disk.endangered(1000) == []
    hashes = [hash_ for hash_, _ in tight.scheduler.moves.disk.endangered(1000)]
    [request] = tight.requests.values()
    assert hashes == request.page_hashes[1::-1]  # its end is evicted before its beginning


def test_a_pool_without_a_disk_plans_no_moves(make_engine: Callable) -> None:
    engine = make_engine(num_pages=16)
    kinds = engine.scheduler.moves.kinds
    disk = disk_pages.DiskPages(engine.scheduler.pool, None, kinds)
    request = engine.add([1] * 9, 1)
    engine.drain()
    assert disk.unwritten(kinds[0], 1000) == []
    assert disk.reach(request.page_hashes, 0, 0, 2) == 0
    assert disk.save(request) is None
    assert not disk.pop_plan()


# ---- what will be found


def test_what_a_prompt_will_find_is_known_before_it_waits(make_engine: Callable) -> None:
    engine = make_engine()
    scheduler = engine.scheduler
    written(engine, [*range(8)])
    on_disk = engine.add([*range(8), *range(20, 28), 1], 1)
    assert scheduler.planner.admission.num_found(on_disk.asked) == 8
    assert not on_disk.page_table
    engine.drain()
    assert scheduler.planner.admission.num_found(on_disk.asked) == 16
    assert scheduler.planner.admission.num_found(replace(on_disk.asked, cache_salt=b"other")) == 0
    assert scheduler.planner.admission.num_found(replace(on_disk.asked, skips_cache=True)) == 0
    scheduler.check()


# ---- ends of conversations: read without the pages that memory still has

ENDS: dict[str, dict[str, Any]] = {
    "windows": {"window": 9, "num_window_pages": 12},
    "states": {"num_state_slots": 4},
    "windows and states": {"window": 9, "num_window_pages": 12, "num_state_slots": 4},
}


def continue_without_end(engine: GhostEngine, prompt: list[int], num_others: int = 12) -> None:
    """Have a prompt in memory and on disk, lose its ends in memory to other prompts, and continue it."""
    engine.add(prompt, 1)
    engine.drain()
    engine.clean(1000)
    for number in range(num_others):
        engine.add([300 + 100 * number + i for i in range(17)], 1)
        engine.drain()
    engine.add([*prompt, 7, 8, 9], 4, request_id="next")
    read_something(engine)


def num_units(load: Load, engine: GhostEngine) -> dict[str, int]:
    names = [kind.name for kind in engine.scheduler.moves.kinds]
    return dict(zip(names, map(len, [load.pages, *load.ends]), strict=True))


@pytest.mark.parametrize("kinds", ENDS)
def test_an_end_is_read_alone_where_its_pages_are_in_memory(
    make_engine: Callable, kinds: str
) -> None:
    """Of 40 tokens nothing but the last window and state is read; all of them are cache hits."""
    engine = make_engine(num_pages=200, **ENDS[kinds])
    continue_without_end(engine, list(range(100, 141)))
    [load] = engine.loads
    assert load.num_saved == 10
    wanted = {"pages": 0, "windows": 2, "states": 1}
    assert num_units(load, engine) == {
        name: wanted[name] for name in ("pages", *kinds.split(" and "))
    }
    num_computed = engine.num_computed
    engine.drain()
    assert engine.num_computed == num_computed + 4 + 3
    request = engine.requests["next"]
    assert request.cache is not None
    assert (request.num_cached, request.cache.num_tokens, request.cache.num_from_disk) == (
        40,
        40,
        0,
    )
    assert engine.scheduler.stats().restored_tokens == 0


def test_of_a_window_only_the_pages_that_memory_lacks_are_read(make_engine: Callable) -> None:
    engine = make_engine(num_pages=200, window=9, num_window_pages=12)
    prompt = list(range(100, 141))
    engine.add(prompt, 1)
    engine.drain()
    engine.clean(1000)
    windows = find(engine.scheduler.page_tables.ends, WindowPages)
    hashes = engine.requests["r0"].page_hashes
    windows.forget([hashes[9]])
    assert windows.has(hashes[8])
    del engine.disk.windows[hashes[8]]
    engine.disk.pages.clear()
    engine.add([*prompt, 7, 8, 9], 4)
    read_something(engine)
    [load] = engine.loads
    assert [[hash_ for hash_, _ in units] for units in load.ends] == [[hashes[9]]]
    engine.drain()
    assert engine.requests["r1"].num_cached == 40


@pytest.mark.parametrize("kinds", ENDS)
def test_the_pages_that_memory_lacks_are_read_with_the_end(
    make_engine: Callable, kinds: str
) -> None:
    engine = make_engine(num_pages=30, **ENDS[kinds])
    continue_without_end(engine, list(range(100, 141)), num_others=6)
    [load] = engine.loads
    assert 0 < load.run.first < 10
    assert len(load.pages) == 10 - load.run.first
    engine.drain()
    request = engine.requests["next"]
    assert request.cache is not None
    assert request.num_cached == request.cache.num_tokens == 40
    assert request.cache.num_from_disk == 40 - 4 * load.run.first
    assert engine.scheduler.stats().restored_tokens == request.cache.num_from_disk


@pytest.mark.parametrize("kinds", ENDS)
def test_an_end_that_is_lost_costs_all_that_memory_cannot_continue_after(
    make_engine: Callable, kinds: str
) -> None:
    engine = make_engine(num_pages=200, **ENDS[kinds])
    continue_without_end(engine, list(range(100, 141)))
    request = engine.requests["next"]
    engine.disk.windows.clear()
    engine.disk.states.clear()
    engine.finish_load(engine.loads[0])
    assert (request.num_computed, len(request.page_table)) == (0, 0)
    engine.drain()
    assert request.cache is not None
    assert request.cache.reason is CacheMiss.LOST
    assert request.num_cached == request.cache.num_tokens == 0


@pytest.mark.parametrize("kinds", ENDS)
def test_an_end_that_several_prompts_continue_is_read_once(
    make_engine: Callable, kinds: str
) -> None:
    engine = make_engine(num_pages=200, **ENDS[kinds])
    prompt = list(range(100, 141))
    continue_without_end(engine, prompt)
    follower = engine.add([*prompt, 5, 6], 1)
    engine.launch()
    [load] = engine.loads
    assert follower in engine.scheduler.roster.followers
    engine.finish_load(load)
    assert follower not in engine.scheduler.roster.followers, "it waits for what was read alone"
    engine.drain()
    assert not engine.loads
    assert follower.num_cached == 40

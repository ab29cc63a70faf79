"""Resizing a pool in use: held pages move, and what would not fit is refused or preempted.

`GhostEngine.resize` moves what the slots hold, counts on its own whether a resize is to be refused,
and every step after it attends over the slots that have moved.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest

from mlxserve.config import PreemptionMode
from mlxserve.errors import InvalidParameter, PagesPromised, PrefixQuotaExceeded
from mlxserve.request import LiveRequest, RequestState

PREFIX = list(range(100, 118))  # 4 full pages, and 2 tokens


def run_until(engine: object, is_there: Callable[[], bool]) -> None:
    for _ in range(100):
        if is_there():
            return
        engine.step()
    raise AssertionError("the condition never came true")


def occupy(engine: object, num_pages: int) -> LiveRequest:
    """A request that holds the first pages, so that other requests get higher ids."""
    length = num_pages * engine.scheduler.pool.page_size - 1
    request = engine.add([9] * length, 24)
    run_until(engine, lambda: request.num_computed >= length)
    return request


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
    capacity = engine.scheduler.page_tables.capacity
    assert (engine.scheduler.max_model_len, capacity(request)) == (16, 16)
    resized = engine.resize(20)
    assert (resized.moves, resized.num_preempted, resized.num_forgotten) == ({}, 0, 0)
    assert (resized.max_model_len, capacity(request)) == (64, 64)
    assert engine.scheduler.max_model_len == 64
    engine.add(PREFIX, 1, pins=True)
    engine.drain()
    assert len(request.token_ids) > 16
    assert engine.scheduler.pool.num_free == 15


# ---- smaller


def test_running_answers_are_the_same_after_their_pages_moved(make_engine: Callable) -> None:
    engine = make_engine(num_pages=32)
    first = occupy(engine, 10)
    others = [engine.add([number] * 9, 12) for number in (1, 2)]
    run_until(engine, lambda: all(r.num_outputs > 2 for r in others))
    tables = [tuple(request.page_table) for request in others]
    engine.abort(first.id)
    resized = engine.resize(8)
    assert resized.moves.keys() == {page for table in tables for page in table if page >= 8}
    assert resized.num_preempted == 0
    for request, table in zip(others, tables, strict=True):
        assert list(request.page_table) == [resized.moves.get(page, page) for page in table]
    engine.drain()  # judged by the slots attended, and by the answers


def test_pages_that_two_share_move_once(make_engine: Callable) -> None:
    engine = make_engine(num_pages=32)
    first = occupy(engine, 10)
    engine.add(PREFIX[:16], 20)
    run_until(engine, lambda: engine.scheduler.pool.num_cached > 4)
    engine.add([*PREFIX[:16], 1, 2], 8)
    run_until(engine, lambda: engine.scheduler.stats().num_running == 3)
    engine.abort(first.id)
    engine.resize(9)
    one, other = engine.scheduler.requests()[0]
    assert one.page_table[:4] == other.page_table[:4]
    engine.drain()


def test_a_named_prefix_is_found_where_it_has_moved(make_engine: Callable) -> None:
    engine = make_engine(num_pages=32)
    first = occupy(engine, 12)
    prefix = engine.add(PREFIX, 1, pins=True)
    run_until(engine, lambda: engine.pinned)
    engine.abort(first.id)
    assert len(engine.resize(10).moves) == 5, "its tail as well"
    request = engine.add([*PREFIX, 1, 2, 3])
    engine.drain()
    assert request.num_cached == 18
    engine.unpin(prefix)
    assert engine.scheduler.pool.num_used == 0


def test_kept_pages_survive_a_smaller_pool(make_engine: Callable) -> None:
    engine = make_engine(num_pages=32)
    turn = engine.add(list(range(16)), 1)
    engine.drain()
    engine.scheduler.keep_pages(turn.asked, 100.0)
    for number in (1, 2, 3):
        engine.add([number] * 16, 1)
        engine.drain()
    resized = engine.resize(6)
    assert resized.num_forgotten == engine.scheduler.pool.num_evicted == 10
    again = engine.add([*range(16), 5], 1)
    engine.drain()
    assert again.num_cached == 16


def test_what_waits_is_matched_anew(make_engine: Callable) -> None:
    """Its remembered match names pages; a request that it follows keeps admission from looking again."""
    engine = make_engine(num_pages=24, max_model_len=96, growth_pages=0)
    first = occupy(engine, 10)
    large = engine.add(PREFIX[:16] + [5] * 16, 24)
    run_until(engine, lambda: large.num_computed >= 32)
    second = occupy(engine, 3)
    waiting = engine.add(PREFIX[:16] + [6] * 40, 4)
    engine.step()
    assert waiting.state is RequestState.WAITING
    cache = engine.scheduler.page_tables.cache
    assert cache.match(waiting) == list(large.page_table[:4])
    engine.abort(first.id)
    engine.resize(15)
    assert cache.match(waiting) == list(large.page_table[:4]), "the pages it has moved to"
    engine.abort(second.id)
    engine.drain()
    assert waiting.num_cached == 16


def test_a_follower_still_waits_for_its_leader_after_a_resize(make_engine: Callable) -> None:
    engine = make_engine(num_pages=40, max_num_batched_tokens=8, prefix_follow_pages=2)
    first = occupy(engine, 12)
    leader = engine.add([*range(32)], 4)
    engine.step()
    follower = engine.add([*range(32), 1, 2], 4)
    engine.step()
    assert follower.state is RequestState.WAITING
    engine.abort(first.id)
    assert engine.resize(12).moves
    engine.drain()
    assert follower.num_cached == 32
    assert len(leader.token_ids) == 36


def test_a_copy_that_was_not_made_yet_is_made_in_the_new_pages(make_engine: Callable) -> None:
    engine = make_engine(num_pages=32)
    first = occupy(engine, 12)
    leader = engine.add(PREFIX, 8)
    forks = [engine.add(PREFIX, 8, fork_of=leader) for _ in range(2)]
    run_until(engine, lambda: leader.num_computed >= 18)
    engine.abort(first.id)
    while engine.unread:
        engine.read()
    assert engine.scheduler.pool.ref_count(leader.page_table[4]) == 3, "held for two copies"
    assert engine.resize(12).moves
    engine.drain()
    assert len({tuple(engine.answers[r.id]) for r in (leader, *forks)}) == 1


def test_a_smaller_pool_has_fewer_hot_pages_and_a_smaller_quota(make_engine: Callable) -> None:
    engine = make_engine(num_pages=32, max_pinned_fraction=0.5, hot_after_hits=1)
    for _ in range(3):
        engine.add(list(range(40)), 1)
        engine.drain()
    assert engine.scheduler.pool.num_hot > 5
    engine.resize(10)
    assert engine.scheduler.pool.num_hot == 5
    with pytest.raises(PrefixQuotaExceeded, match="of the 5"):
        engine.add([1] * 24, 1, pins=True)


# ---- too many for fewer pages


@pytest.mark.parametrize("mode", PreemptionMode)
def test_requests_without_room_in_a_smaller_pool_are_preempted(
    mode: PreemptionMode, make_engine: Callable, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    engine = make_engine(num_pages=32, preemption_mode=mode)
    requests = [engine.add([number] * 14, 16) for number in range(4)]
    run_until(engine, lambda: all(r.num_outputs > 1 for r in requests))
    resized = engine.resize(10)
    assert resized.num_preempted == engine.scheduler.stats().num_preemptions == 2
    assert [r.state for r in requests].count(RequestState.WAITING) == 2
    assert "preempted by PreemptionMode." in caplog.text
    assert mode.name in caplog.text
    assert bool(engine.disk.pages) == (mode is PreemptionMode.SWAP)
    engine.drain()
    assert all(len(answer) == 16 for answer in engine.answers.values())


def test_forks_that_have_no_page_of_their_own_give_way_as_well(make_engine: Callable) -> None:
    """Each shares all its pages, so none of them alone would free one."""
    engine = make_engine(num_pages=32, max_num_batched_tokens=128)
    groups = [engine.fork([*range(first, first + 33)], 8, 3) for first in (0, 100)]
    engine.launch()
    engine.read()
    for leader, *_ in groups:  # the last token began a page, which only the leader has
        engine.abort(leader.id)
    forks = [fork for _, *forks in groups for fork in forks]
    assert [len(fork.page_table) for fork in forks] == [8] * 4
    assert engine.resize(11).num_preempted == 2
    engine.drain()
    assert all(len(engine.answers[fork.id]) == 8 for fork in forks)


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


def test_up_and_down_again_leaves_everything_as_it_was(make_engine: Callable) -> None:
    engine = make_engine(num_pages=16)
    for number in range(3):
        engine.add([number] * 12, 1)
        engine.drain()
    known = engine.scheduler.pool.num_cached
    for num_pages in (40, 9, 30, 16):
        engine.resize(num_pages)
    assert engine.scheduler.pool.num_cached == known
    for number in range(3):
        assert engine.add([number] * 13, 1) is not None
        engine.drain()
    assert engine.scheduler.stats().prefix_hits == 3 * 12

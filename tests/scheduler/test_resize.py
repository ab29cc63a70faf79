"""Resizing a pool in use: a larger one keeps everything, a smaller one begins empty, and answers go on.

`GhostEngine.resize` counts on its own whether a resize is to be refused, and forgets what the slots
hold where the pool becomes smaller: every step after it attends over what was computed since.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from itertools import count
from typing import Any

import pytest

from mlxserve.cache.kinds.state_slots import StateSlots
from mlxserve.cache.kinds.window_pages import WindowPages
from mlxserve.cache.pages import PagePool
from mlxserve.core.config import PreemptionMode
from mlxserve.core.errors import InvalidParameter, PagesPromised, PrefixQuotaExceeded
from mlxserve.request import LiveRequest, RequestState, Sampled
from mlxserve.scheduler.roster import Roster
from tests.reliability.faults import Fault, Point

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


# ---- refused for the share of a key

KEY: Any = {"max_tokens": 1, "pins": True, "client": "key", "pin_share": 0.5}


def with_two_prefixes(make_engine: Callable, **options: Any) -> tuple[Any, LiveRequest]:
    """(engine, prefix): 9 pages of a key are pinned, and 7 more wait to be; three answers run beside them."""
    engine = make_engine(
        **{
            "num_pages": 90,
            "page_size": 16,
            "max_model_len": 512,
            "max_num_batched_tokens": 64,
            **options,
        }
    )
    engine.add([1] * 144, **KEY)
    engine.drain()
    for number in range(3):
        engine.add([10 + number] * 20, 30)
    return engine, engine.add([2] * 112, **KEY)


KINDS: Any = {
    "attention": {},
    "windows": {"window": 24, "num_window_pages": 20},
    "states": {"num_state_slots": 20},
    "drafts": {"speculative_tokens": 5},
    "swap": {"preemption_mode": PreemptionMode.SWAP},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("progress", ["waits", "is half computed", "is pinned"])
def test_a_pool_too_small_for_the_prefixes_of_a_key_is_refused_and_no_answer_is_lost(
    make_engine: Callable, kind: str, progress: str
) -> None:
    engine, second = with_two_prefixes(make_engine, **KINDS[kind])
    if progress == "is half computed":
        run_until(engine, lambda: 0 < second.num_computed < 112)
    elif progress == "is pinned":
        run_until(engine, lambda: second.is_finished)
    for num_pages in (36, 63, 36):
        with pytest.raises(
            PrefixQuotaExceeded,
            match=rf"one API key has named prefixes of 16 pages, but of {num_pages} pages it may have only "
            rf"{num_pages // 4}.*Remove a prefix of that key, or keep more pages",
        ):
            engine.resize(num_pages)
    engine.drain()
    assert len(engine.answers) == 5
    engine.resize(64)  # the least of which a quarter is 16
    engine.drain()
    assert engine.scheduler.pool.num_pinned == 16


def test_each_key_has_its_share_of_a_smaller_pool(make_engine: Callable) -> None:
    engine = make_engine(num_pages=60, max_pinned_fraction=0.5)
    for number, client in enumerate("ab"):
        engine.add([number] * 20, **{**KEY, "client": client})
    engine.add(
        [0] * 8 + [7] * 8, **{**KEY, "client": "b"}
    )  # its first two pages are of the other key as well
    for num_pages, words in (
        (19, "have 12 pages"),
        (35, "one API key has named prefixes of 9 pages"),
    ):
        with pytest.raises(PrefixQuotaExceeded, match=words):
            engine.resize(num_pages)
    engine.resize(36)
    engine.drain()
    assert len(engine.pinned) == 3


def test_a_key_that_had_the_whole_quota_keeps_it(make_engine: Callable) -> None:
    engine = make_engine(num_pages=60, max_pinned_fraction=0.5)
    engine.add([1] * 20, **{**KEY, "pin_share": 1.0})
    engine.add([2] * 20, **KEY)
    engine.drain()
    engine.resize(20)
    with pytest.raises(PrefixQuotaExceeded, match="have 10 pages, but of 19"):
        engine.resize(19)
    engine.drain()
    assert len(engine.pinned) == 2


def test_a_prefix_of_a_key_is_kept_over_any_number_of_sizes(make_engine: Callable) -> None:
    engine, _ = with_two_prefixes(make_engine)
    for num_pages, is_refused in ((64, False), (63, True), (90, False), (70, False), (64, False)):
        engine.step()
        with pytest.raises(PrefixQuotaExceeded) if is_refused else nullcontext():
            engine.resize(num_pages)
    engine.drain()
    assert engine.scheduler.pool.num_pinned == 16
    engine.unpin(engine.pinned[0])
    engine.resize(48)
    engine.drain()
    assert engine.scheduler.pool.num_pinned in (7, 9)


@pytest.mark.parametrize("mode", PreemptionMode)
def test_a_resize_that_is_refused_beside_preempted_answers_loses_none(
    make_engine: Callable, mode: PreemptionMode
) -> None:
    engine = make_engine(num_pages=24, max_pinned_fraction=0.5, preemption_mode=mode)
    engine.add([1] * 16, **KEY)
    engine.drain()
    requests = [engine.add([20 + number] * 6, 54) for number in range(4)]
    run_until(engine, lambda: engine.scheduler.stats().num_preemptions > 1)
    assert any(r.num_preemptions and r.state is RequestState.WAITING for r in requests)
    with pytest.raises(PrefixQuotaExceeded):
        engine.resize(15)
    with pytest.raises(PagesPromised, match="was promised 60"):
        engine.resize(18)
    engine.resize(19)
    engine.drain()
    assert all(len(engine.answers[r.id]) == 54 for r in requests)
    assert engine.scheduler.pool.num_pinned == 4


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


def test_a_named_prefix_that_is_aborted_while_it_is_computed_again_stays_gone(
    make_engine: Callable, caplog: pytest.LogCaptureFixture
) -> None:
    """Its claim went with its request: another pool may have no room for it."""
    engine = make_engine(num_pages=40, max_pinned_fraction=0.5)
    prefix = engine.add(PREFIX, 1, pins=True)
    engine.drain()
    engine.resize(30)
    engine.abort(prefix.id)
    assert engine.scheduler.page_tables.pins.num_pages == 0
    engine.resize(5)
    assert not engine.scheduler.roster.ids
    assert not caplog.records, "nothing is given up that nobody has"
    engine.add([1] * 12, 4)
    engine.drain()


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


def test_the_same_size_asks_for_no_room_to_compute_prefixes_again(
    make_engine: Callable, caplog: pytest.LogCaptureFixture
) -> None:
    """Two prefixes fill a pool in which the first cannot be computed any more."""
    engine = make_engine(num_pages=3, max_pinned_fraction=1.0)
    for prompt in ([1] * 8, [2] * 3):
        engine.add(prompt, 1, pins=True)
        engine.drain()
    engine.resize(3)
    assert engine.scheduler.pool.num_pinned == 3
    with caplog.at_level(logging.ERROR):
        engine.fail()
    assert "1 named prefixes are not kept" in caplog.text
    engine.drain()
    assert engine.scheduler.pool.num_pinned == 2


@pytest.mark.parametrize("at", range(4))
def test_a_resize_that_fails_on_its_way_loses_no_named_prefix(
    make_engine: Callable, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """The engine begins again after it, and computes them all."""
    engine = make_engine(num_pages=60, max_pinned_fraction=0.5)
    for number, client in enumerate("abc"):
        engine.add([number] * 20, **{**KEY, "client": client})
    engine.drain()
    engine.add([7] * 20, 30)
    scheduler, arrive, calls = engine.scheduler, Roster.arrive, count()

    def failing(roster: Roster, request: LiveRequest) -> None:
        arrive(roster, request)
        if next(calls) == at:
            raise OSError("planted")

    monkeypatch.setattr(Roster, "arrive", failing)
    with pytest.raises(OSError, match="planted"):
        scheduler.resize(40)
    scheduler.restart()
    assert len(scheduler.roster.prefixes) == 3
    assert {one.id for one in engine.pinned} <= scheduler.roster.ids
    while scheduler.has_work:
        chunks = scheduler.schedule()
        scheduler.update(chunks, [Sampled(0) if chunk.samples else None for chunk in chunks])
    scheduler.check()
    assert scheduler.pool.num_pinned == 3 * 5


@pytest.mark.parametrize("kind", [PagePool, StateSlots, WindowPages])
def test_a_resize_that_fails_changes_no_memory_that_kinds_share(
    make_engine: Callable, kind: type
) -> None:
    """A pool that grew again had lost what the failed resize took, and its longest request waited for ever."""
    engine = make_engine(num_pages=40, window=12, shared=3, state_bytes=10, max_model_len=4096)
    engine.add([1] * 20, 1)
    engine.drain()
    scheduler = engine.scheduler

    fault = Fault(Point(kind, "renewed"), lambda: OSError("planted"))
    with fault.planted(), pytest.raises(OSError, match="planted"):
        scheduler.resize(20)
    engine.fail()
    engine.resize(8)
    engine.resize(30)
    scheduler.check()
    longest = scheduler.max_model_len
    engine.add([2] * (longest - 2), 1)
    engine.drain()


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

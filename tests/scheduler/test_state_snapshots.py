"""Where recurrent states are kept, which ones are given up first, and what a missing one costs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from mlxserve.cache.kinds.kind import find
from mlxserve.cache.kinds.state_slots import StateSlots
from mlxserve.core.errors import PromptTooLong
from mlxserve.core.stats import StateStats
from mlxserve.request import CacheMiss, Chunk, LiveRequest, StatePlan
from tests.scheduler.conftest import GhostEngine

MakeEngine = Callable[..., GhostEngine]
PAGE = 4
ROOMY = 64


def kept(engine: GhostEngine, *names: str) -> list[int]:
    """Positions at which the chunks of these requests kept their state, read or not."""
    return sorted(
        position
        for chunks, _ in engine.unread
        for chunk in chunks
        if chunk.request.id in names and chunk.state is not None
        for position, _ in chunk.state.keeps
    )


def stats_of(engine: GhostEngine) -> StateStats:
    states = find(engine.scheduler.page_tables.ends, StateSlots)
    assert states is not None
    return states.stats.copy()


def answered(engine: GhostEngine, prompt: list[int], **options: Any) -> LiveRequest:
    request = engine.add(prompt, **{"max_tokens": 1, **options})
    engine.drain()
    return request


def test_a_prompt_keeps_its_last_boundaries_for_itself_and_for_the_next_turn(
    make_engine: MakeEngine,
) -> None:
    engine = make_engine(num_state_slots=ROOMY)
    engine.add(list(range(1, 31)), request_id="a")
    engine.launch()
    assert kept(engine, "a") == [12, 28]  # before token 30, and 16 tokens before the end


def test_the_same_prompt_and_the_next_turn_begin_with_a_kept_state(
    make_engine: MakeEngine,
) -> None:
    engine = make_engine(num_state_slots=ROOMY)
    prompt = list(range(1, 31))
    answered(engine, prompt)
    assert answered(engine, prompt).num_cached == 28
    assert answered(engine, [*prompt[:15], *range(50, 60)]).num_cached == 12


def test_where_two_prompts_part_the_second_computes_and_the_third_finds_it(
    make_engine: MakeEngine,
) -> None:
    engine = make_engine(num_state_slots=ROOMY)
    shared = list(range(1, 22))
    answered(engine, [*shared, *range(100, 130)])
    second = answered(engine, [*shared, *range(200, 230)])
    third = answered(engine, [*shared, *range(300, 330)])
    assert (second.num_cached, third.num_cached) == (0, 20)
    assert second.cache is not None
    assert second.cache.reason is CacheMiss.NO_SNAPSHOT
    assert stats_of(engine).missed_tokens == 20


def test_a_prompt_that_waits_for_another_continues_from_its_state(make_engine: MakeEngine) -> None:
    """Without it, prompts that arrive together would each compute their common beginning."""
    engine = make_engine(num_state_slots=ROOMY, long_prefill_token_threshold=8)
    shared = list(range(1, 22))
    engine.add([*shared, *range(100, 120)])
    follower = engine.add([*shared, *range(200, 220)])
    engine.drain()
    assert follower.num_cached == 20


def test_the_samples_of_a_prompt_begin_with_the_state_of_the_first(make_engine: MakeEngine) -> None:
    engine = make_engine(num_state_slots=ROOMY)
    first, *others = engine.fork(list(range(1, 31)), 3, 3)
    engine.drain()
    assert first.num_cached == 0
    assert [other.num_cached for other in others] == [28, 28]


def test_a_preempted_request_continues_from_its_newest_boundary(make_engine: MakeEngine) -> None:
    engine = make_engine(num_pages=64, num_state_slots=ROOMY)
    request = engine.add(list(range(1, 31)), 30)
    for _ in range(12):
        engine.step()
    while engine.unread:
        engine.read()
    num_computed = request.num_computed
    assert engine.reset(force=True)
    engine.drain()
    stats = engine.scheduler.stats()
    assert num_computed >= 36
    assert stats.resumed_hits == 0, "a forced reset forgets the pages, and the states after them"

    again = engine.add(list(range(51, 81)), 30)
    for _ in range(12):
        engine.step()
    while engine.unread:
        engine.read()
    engine.scheduler.preemption.preempt_to(0)
    num_lost = again.num_lost
    engine.drain()
    assert num_lost - engine.scheduler.stats().resumed_hits < PAGE


def test_requests_that_skip_the_cache_keep_nothing(make_engine: MakeEngine) -> None:
    engine = make_engine(num_state_slots=ROOMY)
    answered(engine, list(range(1, 31)), skips_cache=True, max_tokens=9)
    assert engine.scheduler.moves.unit_names()["states"] == set()


def test_a_state_after_a_token_that_was_dropped_is_not_kept(make_engine: MakeEngine) -> None:
    engine = make_engine(num_state_slots=2, max_num_seqs=1)  # none but for the running request
    prompt = list(range(1, 8))
    request = engine.add(prompt, 9)
    engine.launch()
    engine.launch()  # the eighth token, which completes the second page
    assert kept(engine, request.id) == [8]
    engine.abort(request.id)  # before that token is read
    while engine.unread:
        engine.read()
    assert stats_of(engine).num_snapshots == 0
    assert answered(engine, [*prompt, 9]).num_cached == 0


def test_a_reset_forgets_the_states(make_engine: MakeEngine) -> None:
    engine = make_engine(num_state_slots=ROOMY)
    answered(engine, list(range(1, 31)))
    assert engine.scheduler.moves.unit_names()["states"]
    assert engine.reset()
    engine.states.drop()
    assert engine.scheduler.moves.unit_names()["states"] == set()


def test_states_after_lost_pages_go_first_and_the_least_recently_used_next(
    make_engine: MakeEngine,
) -> None:
    engine = make_engine(num_pages=64, max_num_seqs=2, num_state_slots=4 + 2)
    first, second = list(range(1, 8)), list(range(11, 18))  # one boundary each: after 4 tokens
    answered(engine, first)
    answered(engine, second)
    assert answered(engine, first).num_cached == PAGE  # used: now the second is the older one
    for start in (21, 31, 41):
        answered(engine, list(range(start, start + 7)))
    assert answered(engine, second).num_cached == 0


def test_pages_that_are_kept_keep_the_state_after_them(make_engine: MakeEngine) -> None:
    engine = make_engine(num_pages=64, max_num_seqs=2, num_state_slots=4 + 2)
    prompt = list(range(1, 8))
    engine.scheduler.keep_pages(answered(engine, prompt).asked, until=9.0)
    for start in range(11, 71, 10):
        answered(engine, list(range(start, start + 7)))
    assert answered(engine, prompt).num_cached == PAGE


def test_a_named_prefix_keeps_the_state_at_its_end(make_engine: MakeEngine) -> None:
    engine = make_engine(num_pages=64, max_num_seqs=2, num_state_slots=4 + 2)
    prefix = list(range(1, 9))
    answered(engine, prefix, pins=True)
    for start in range(11, 71, 10):
        answered(engine, list(range(start, start + 7)))
    assert answered(engine, [*prefix, 99]).num_cached == len(prefix)


def test_a_passer_by_takes_no_state_of_a_named_prefix(make_engine: MakeEngine) -> None:
    """Also where there is no other state to give up."""
    engine = make_engine(num_pages=64, max_num_seqs=2, num_state_slots=4)
    prefix = list(range(1, 9))
    answered(engine, prefix, pins=True)
    answered(engine, list(range(11, 35)))  # which would keep two
    assert answered(engine, [*prefix, 99]).num_cached == len(prefix)


def test_after_a_failure_there_are_no_states(make_engine: MakeEngine) -> None:
    engine = make_engine(num_state_slots=ROOMY)
    answered(engine, list(range(1, 31)))
    assert stats_of(engine).num_snapshots == 2
    engine.scheduler.restart()
    stats = stats_of(engine)
    assert (stats.num_slots, stats.num_snapshots) == (ROOMY, 0)
    assert engine.scheduler.moves.unit_names()["states"] == set()


@pytest.mark.parametrize("pins", [False, True])
def test_room_is_promised_as_if_no_state_were_kept_after_pinned_pages(
    pins: bool, make_engine: MakeEngine
) -> None:
    """The running request's slots may take the states of named prefixes, whose pages stay."""
    prefix = list(range(1, 33))  # 8 pages
    other = [*prefix[:16], *range(50, 66)]
    for num_pages in (16, 17):
        engine = make_engine(
            num_pages=num_pages, num_state_slots=2, max_num_seqs=1, max_pinned_fraction=1.0
        )
        engine.add(prefix, 1, pins=True)
        engine.drain()
        if num_pages == 16:
            with pytest.raises(PromptTooLong, match="beside 8 pinned pages"):
                engine.add(other, 1, pins=pins)
        else:
            engine.add(other, 1, pins=pins)
            engine.drain()
            assert engine.scheduler.pool.num_pinned == (12 if pins else 8)


# ---- planted bugs: the ghost states find each


def another_position(real: Callable[..., StatePlan]) -> Callable[..., StatePlan]:
    def plan(self: StateSlots, request: LiveRequest, start: int, end: int) -> StatePlan:
        restore, keeps = real(self, request, start, end)
        moved = [(max(start + 1, position - PAGE), id_) for position, id_ in keeps]
        return StatePlan(restore, tuple(moved))

    return plan


def restored_twice(real: Callable[..., StatePlan]) -> Callable[..., StatePlan]:
    restored: dict[LiveRequest, int] = {}

    def plan(self: StateSlots, request: LiveRequest, start: int, end: int) -> StatePlan:
        found = real(self, request, start, end)
        if found.restore is not None:
            restored[request] = found.restore
        return found._replace(restore=restored.get(request))

    return plan


def never_lost(real: Callable[..., int]) -> Callable[..., int]:
    """As many pages as are cached, whether a state follows them or not."""

    def num_usable(self: StateSlots, hashes: list[bytes], num_pages: int, has: Any = None) -> int:
        return num_pages if self.ids() and real(self, hashes, num_pages, has) else 0

    return num_usable


def found_too_early(real: Callable[..., StatePlan]) -> Callable[..., StatePlan]:
    """A snapshot of the request's own boundary is given up when it is planned."""

    def plan(self: StateSlots, request: LiveRequest, start: int, end: int) -> StatePlan:
        found = real(self, request, start, end)
        self.commit(Chunk(request, start, end - start, request.page_table, False, state=found))
        return found

    return plan


@pytest.mark.parametrize(
    ("method", "bug"),
    [
        ("_plan", another_position),
        ("_plan", restored_twice),
        ("_plan", found_too_early),
        ("num_usable", never_lost),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_a_planted_bug_is_found(
    method: str, bug: Callable[..., Any], make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def serve() -> None:
        engine = make_engine(num_state_slots=16 + 2, max_num_batched_tokens=8)
        shared = list(range(1, 22))
        for start in (100, 200, 300, 100, 400, 200):
            engine.add([*shared, *range(start, start + 9)], 9)
            engine.step()
            engine.step()
        engine.drain()

    serve()
    monkeypatch.setattr(StateSlots, method, bug(getattr(StateSlots, method)))
    with pytest.raises((AssertionError, KeyError)):
        serve()

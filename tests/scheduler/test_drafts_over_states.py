"""Drafts over recurrent states: the slots that they take, and the snapshots within them.

The ghost engine judges each chunk's state, and that every state has a slot.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from mlxserve.cache.kinds import draft_states
from mlxserve.cache.kinds.draft_states import DraftStates
from mlxserve.cache.kinds.kind import find
from mlxserve.cache.kinds.state_slots import StateSlots
from mlxserve.cache.pages import PagePool
from mlxserve.core.sampling_params import SamplingParams
from mlxserve.request import STATE_SLOTS, Chunk, FinishReason, LiveRequest, Request
from tests.scheduler.conftest import GhostEngine
from tests.scheduler.test_drafts import play

MakeEngine = Callable[..., GhostEngine]
PAGE = 4
ROOMY = 64


def states_of(engine: GhostEngine) -> StateSlots:
    states = find(engine.scheduler.page_tables.ends, StateSlots)
    assert states is not None
    return states


def num_free(engine: GhostEngine) -> int:
    return states_of(engine).reclaimer.num_free


def drafted(engine: GhostEngine) -> Chunk:
    """Run steps until one with a draft is launched, and return its chunk."""
    while True:
        chunks = engine.launch()
        for chunk in chunks:
            if chunk.draft:
                return chunk
        engine.read()


def test_a_draft_begins_where_the_last_one_was_accepted_up_to(make_engine: MakeEngine) -> None:
    engine = make_engine(speculative_tokens=8, num_state_slots=ROOMY)
    request = engine.add([1, 2, 3], 60)
    engine.drain()
    stats = engine.scheduler.stats()
    assert 0 < stats.accepted_tokens < stats.drafted_tokens
    assert request.num_accepted == stats.accepted_tokens
    assert len(engine.trace) < 60


def test_a_draft_needs_a_slot_for_each_token_and_for_all_boundaries_but_one() -> None:
    assert draft_states.num_needed(0, start=10, page_size=4) == 0
    assert draft_states.num_needed(1, start=12, page_size=4) == 1
    assert (
        draft_states.num_needed(3, start=12, page_size=4) == 3
    )  # up to 16, of which the request has the slot
    assert draft_states.num_needed(8, start=10, page_size=4) == 8 + 1  # 12 and 16
    assert draft_states.num_needed(9, start=11, page_size=4) == 9 + 2  # 12, 16 and 20


def test_a_draft_whose_rows_are_replayed_needs_one_slot_and_those_of_boundaries() -> None:
    needed = partial(draft_states.num_needed, page_size=4, is_replayed=True)
    assert needed(0, start=10) == 0
    assert [needed(1, start=12), needed(3, start=12)] == [1, 1]
    assert needed(8, start=10) == 1 + 1  # 12 and 16
    assert needed(9, start=11) == 1 + 2


@pytest.mark.parametrize("is_replayed", [False, True])
def test_a_state_for_all_rows_of_a_draft_leaves_room_for_longer_ones(*, is_replayed: bool) -> None:
    pool = PagePool(20, 16)
    slots = StateSlots(2 * STATE_SLOTS + 2, pool, is_replayed=is_replayed)
    request = LiveRequest(Request("a", [1, 2, 3], SamplingParams()))
    assert slots.take_draft(request, 8) == (8 if is_replayed else 6)
    assert slots.renewed(pool).take_draft(request, 8) == (8 if is_replayed else 6)


def test_states_of_a_draft_have_slots_until_the_step_after_it_is_read() -> None:
    request = LiveRequest(Request("a", [1, 2, 3], SamplingParams()))
    slots = DraftStates()
    slots.take(request, 3)
    slots.read(request)
    assert slots.num_slots == 3, "the next step begins with one of them"
    slots.take(request, 2)
    assert slots.num_slots == 5
    slots.read(request)
    assert slots.num_slots == 2
    slots.advance(request)
    assert slots.num_slots == 2, "a step without a draft may be unread"
    slots.advance(request)
    assert slots.num_slots == 0
    slots.take(request, 4)
    slots.take(request, 1)
    slots.end(request)
    assert slots.num_slots == 0


def test_slots_are_given_back_with_the_request(make_engine: MakeEngine) -> None:
    engine = make_engine(speculative_tokens=8, num_state_slots=ROOMY)
    request = engine.add([1, 2, 3], 60)
    chunk = drafted(engine)
    assert num_free(engine) <= ROOMY - STATE_SLOTS - len(chunk.draft)
    engine.abort(request.id, FinishReason.ABORT)
    assert num_free(engine) == ROOMY
    engine.drain()


def test_a_draft_is_cut_to_the_slots_that_no_one_needs(make_engine: MakeEngine) -> None:
    """A running request keeps its two, and the two states that its prompt has left."""
    most = {}
    for num_spare in range(8):
        engine = make_engine(
            speculative_tokens=8, max_num_seqs=1, num_state_slots=2 * STATE_SLOTS + num_spare
        )
        engine.add([1, 2, 3], 60)
        engine.drain()
        longest = [length - 1 for step in engine.trace for _, start, length in step if start >= 3]
        most[num_spare] = max(longest)
    assert most[0] == 0, "no draft without a slot"
    assert all(most[num_spare] <= num_spare for num_spare in most)
    assert most[7] > 3


def test_a_draft_drops_cached_states_but_not_those_of_running_conversations(
    make_engine: MakeEngine,
) -> None:
    engine = make_engine(speculative_tokens=8, max_num_seqs=1, num_state_slots=14)
    for number in range(8):
        engine.add([number] * 25, 1)
        engine.drain()
    states = states_of(engine)
    assert states.reclaimer.num_spare < 3
    prompt = list(range(1, 31))
    engine.add(prompt, 40)
    engine.drain()
    assert engine.scheduler.stats().drafted_tokens > 10
    again = engine.add(prompt, 1)
    engine.drain()
    assert again.num_cached == 28


def test_a_draft_drops_no_protected_state(make_engine: MakeEngine) -> None:
    engine = make_engine(speculative_tokens=8, max_num_seqs=1, num_state_slots=10, num_pages=100)
    for number in range(4):
        engine.add([number] * 9, 1, pins=True)
        engine.drain()
    states = states_of(engine)
    pinned = {*states.ids()}
    engine.add([1, 2, 3], 60)
    engine.drain()
    assert engine.scheduler.stats().drafted_tokens > 0
    assert pinned <= states.ids()


def test_a_request_that_waits_for_slots_begins_beside_drafts(make_engine: MakeEngine) -> None:
    engine = make_engine(speculative_tokens=8, num_state_slots=3 * STATE_SLOTS, num_pages=200)
    engine.add([1, 2, 3], 90)
    drafted(engine)
    engine.read()
    other = engine.add([4, 5, 6], 5)
    for _ in range(5):
        engine.step()
    assert other.has_run
    engine.drain()


def test_drafts_get_memory_that_pages_do_not_need(make_engine: MakeEngine) -> None:
    engine = make_engine(
        speculative_tokens=8, max_num_seqs=1, num_pages=64, state_bytes=2, num_state_slots=1
    )
    states = states_of(engine)
    num_slots = states.stats.num_slots
    engine.add([1, 2, 3], 60)
    engine.drain()
    assert engine.scheduler.stats().drafted_tokens > 0
    assert states.stats.num_slots > num_slots


def test_every_boundary_within_a_draft_is_kept_up_to_the_last_accepted_token(
    make_engine: MakeEngine,
) -> None:
    """The judge of states sees each of them again when another request continues it."""
    engine = make_engine(speculative_tokens=16, num_state_slots=ROOMY)
    request = engine.add([1, 2, 3, 1, 2, 3, 1], 60)
    num_taken, rejected = 0, set()
    while not request.is_finished:
        [chunk] = engine.launch()
        assert rejected.isdisjoint(states_of(engine).ids()), "dropped with this launch"
        engine.read()
        if not chunk.draft:
            continue
        keeps = chunk.state.keeps if chunk.state is not None else ()
        ends = range(chunk.start - chunk.start % PAGE + PAGE, chunk.end + 1, PAGE)
        assert [position for position, _ in keeps] == [*ends]
        num_taken += len(keeps)
        rejected |= {id_ for position, id_ in keeps if position > request.num_computed}
    assert 0 < len(rejected) < num_taken
    again = engine.add([*request.token_ids, 5], 3)
    engine.drain()
    assert again.num_cached == (len(request.token_ids) - 1) // PAGE * PAGE


@pytest.mark.parametrize("seed", range(30))
def test_no_order_of_events_breaks_an_invariant(make_engine: MakeEngine, seed: int) -> None:
    draw = random.Random(seed)
    seats = draw.choice([1, 2, 4])
    options: dict[str, Any] = {"num_state_slots": STATE_SLOTS * seats + draw.choice([0, 3, 8, 40])}
    if draw.random() < 0.4:
        options["state_bytes"] = draw.choice([1, 5])
    if draw.random() < 0.4:
        options |= {"window": 6, "num_window_pages": 12}
    engine = make_engine(
        speculative_tokens=draw.choice([2, 8, 16]),
        num_pages=draw.choice([12, 20, 64]),
        max_num_seqs=seats,
        max_model_len=48,
        max_num_batched_tokens=draw.choice([8, 13, 64]),
        **options,
    )
    play(engine, draw)

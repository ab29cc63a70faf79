"""Running answers of lower classes make way for a request that has waited long enough."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from mlxserve.request import BACKGROUND, LiveRequest
from mlxserve.scheduler.urgency import MIN_GAIN
from tests.scheduler.conftest import GhostEngine

SECOND = 1.0  # the wait, by default


@pytest.fixture
def engine(make_engine: Callable[..., GhostEngine]) -> GhostEngine:
    """With one place."""
    return make_engine(num_pages=64, max_num_seqs=1)


def run(engine: GhostEngine, steps: int, now: float = 0.0) -> None:
    engine.scheduler.page_tables.expire(now)
    for _ in range(steps):
        engine.step()


def num_yielded(engine: GhostEngine) -> int:
    return engine.scheduler.stats().priority_preemptions


def test_an_answer_makes_way_once_an_urgent_request_has_waited(engine: GhostEngine) -> None:
    low = engine.add([1] * 5, 100, priority=5)
    run(engine, 5)
    urgent = engine.add([2] * 5, 3, now=10.0)
    run(engine, 5, now=10.0 + 0.9 * SECOND)
    assert num_yielded(engine) == urgent.num_outputs == 0
    run(engine, 5, now=10.0 + SECOND)
    assert urgent.is_finished
    assert (num_yielded(engine), low.num_preemptions) == (1, 1)
    assert engine.scheduler.stats().num_preemptions == 0, "of pages there are enough"
    engine.drain()
    assert len(engine.answers[low.id]) == 100


@pytest.mark.parametrize(("priority", "other"), [(0, 0), (5, 5), (5, 0), (BACKGROUND, 5)])
def test_an_answer_of_the_same_or_a_higher_class_does_not_make_way(
    engine: GhostEngine, priority: int, other: int
) -> None:
    running = engine.add([1] * 5, 30, priority=other)
    run(engine, 3)
    engine.add([2] * 5, 3, priority=priority)
    run(engine, 20, now=1e6)
    assert running.num_outputs > 15
    assert num_yielded(engine) == 0
    engine.drain()


def test_zero_milliseconds_never_preempt(make_engine: Callable[..., GhostEngine]) -> None:
    engine = make_engine(max_num_seqs=1, preempt_for_priority_ms=0)
    engine.add([1] * 5, 50, priority=BACKGROUND)
    run(engine, 3)
    engine.add([2] * 5, 3)
    run(engine, 20, now=1e6)
    assert num_yielded(engine) == 0
    engine.drain()


def test_an_answer_makes_way_for_pages_as_well(make_engine: Callable[..., GhostEngine]) -> None:
    engine = make_engine(num_pages=16, max_num_seqs=4)
    lows = [engine.add([number] * 16, 100, priority=3) for number in range(2)]
    run(engine, 6)
    assert all(low.num_outputs for low in lows)
    urgent = engine.add([9] * 30, 2)
    run(engine, 3)
    assert not urgent.page_table, "it does not fit beside them"
    run(engine, 4, now=SECOND)
    assert urgent.is_finished
    assert num_yielded(engine) == 1, "one of them is enough"
    engine.drain()


def test_no_answer_makes_way_where_that_would_not_be_enough(
    make_engine: Callable[..., GhostEngine],
) -> None:
    engine = make_engine(num_pages=16, max_num_seqs=4)
    engine.add([1] * 30, 20, priority=-1)
    engine.add([2] * 4, 20, priority=3)
    run(engine, 4)
    engine.add([9] * 50, 2)  # needs pages of the first one
    run(engine, 4, now=1e6)
    assert num_yielded(engine) == 0
    engine.drain()


def test_the_lowest_class_makes_way_first_and_the_urgent_one_takes_the_place(
    make_engine: Callable[..., GhostEngine],
) -> None:
    engine = make_engine(max_num_seqs=2, ageing_steps=2)
    low, lowest = (engine.add([n] * 5, 100, priority=n) for n in (3, 7))
    run(engine, 4)
    aged = engine.add([8] * 5, 100, priority=7)
    run(engine, 40)  # it has risen as far as waiting requests can
    urgent = engine.add([9] * 5, 4)
    run(engine, 3, now=SECOND)
    assert urgent.num_outputs > 0
    assert (low.num_preemptions, lowest.num_preemptions, aged.num_outputs) == (0, 1, 0)
    engine.drain()


@pytest.mark.parametrize("length", [100, 400])
def test_an_answer_beside_an_endless_stream_of_urgent_requests_ends(
    make_engine: Callable[..., GhostEngine], length: int
) -> None:
    """It makes way again only once it is twice as long."""
    engine = make_engine(num_pages=150, max_num_seqs=1, max_model_len=500, ageing_steps=2)
    low = engine.add([1] * 5, length, priority=BACKGROUND)
    run(engine, 3)
    lengths: list[int] = []
    urgent: list[LiveRequest] = []
    for step in range(6 * length):
        if low.is_finished:
            break
        if not urgent or urgent[-1].is_finished:
            urgent.append(engine.add([2] * 3, 2, now=float(step)))
        before = low.num_preemptions
        run(engine, 1, now=step + SECOND)
        if low.num_preemptions > before:
            lengths.append(low.num_outputs)
    assert low.is_finished
    for earlier, later in pairwise(lengths):
        assert later >= earlier + max(MIN_GAIN, earlier)
    assert 1 <= len(lengths) <= 2 + (length // MIN_GAIN).bit_length()
    assert len(urgent) > len(lengths)
    engine.drain()


@pytest.mark.parametrize("options", [{}, {"preemption_mode": "swap"}, {"num_state_slots": 6}])
def test_an_answer_that_made_way_is_the_same(
    make_engine: Callable[..., GhostEngine], options: dict[str, Any]
) -> None:
    """The ghost engine holds every slot against the tokens that it should have."""
    engine = make_engine(num_pages=40, max_num_seqs=2, **options)
    lows = [engine.add([number] * 9, 60, priority=2) for number in range(2)]
    for step in range(60):
        if step % 7 == 3:
            engine.add([step] * 6, 3, now=float(step))
        run(engine, 1, now=step + SECOND)
    assert num_yielded(engine) >= 2
    engine.drain()
    assert [len(engine.answers[low.id]) for low in lows] == [60, 60]


def test_only_answers_of_a_lower_class_make_way(make_engine: Callable[..., GhostEngine]) -> None:
    """Of two classes that run, the one of the waiting request is left alone."""
    engine = make_engine(num_pages=16, max_num_seqs=4)
    same = engine.add([1] * 24, 30)
    low = engine.add([2] * 8, 30, priority=3)
    run(engine, 5)
    engine.add([9] * 40, 2)  # needs the pages of both
    run(engine, 4, now=SECOND)
    assert (same.num_preemptions, low.num_preemptions) == (0, 0)
    engine.drain()

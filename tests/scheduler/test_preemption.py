from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from mlxserve.cache.pages import PagePool
from mlxserve.core.config import PreemptionMode
from mlxserve.core.sampling_params import SamplingParams
from mlxserve.request import LiveRequest, Request, as_page_table
from mlxserve.scheduler import preemption
from mlxserve.scheduler.preemption import choose_victim, recompute_cost
from tests.scheduler.conftest import GhostEngine

PAGE_SIZE = 4


@pytest.fixture
def pool() -> PagePool:
    return PagePool(64, PAGE_SIZE)


def running(
    pool: PagePool,
    arrival: int,
    num_pages: int,
    *,
    shared: Sequence[int] = (),
    priority: int = 0,
    num_preemptions: int = 0,
    num_in_flight: int = 0,
) -> LiveRequest:
    """A running request with `shared` pages and `num_pages` of its own, all computed."""
    pool.retain(shared)
    table = as_page_table([*shared, *(pool.allocate(num_pages) or ())])
    prompt = [1] * (len(table) * PAGE_SIZE + 1)
    return LiveRequest(
        Request(f"r{arrival}", prompt, SamplingParams(), priority=priority),
        arrival=arrival,
        num_computed=len(table) * PAGE_SIZE,
        num_preemptions=num_preemptions,
        num_in_flight=num_in_flight,
        page_table=table,
    )


def test_the_lowest_class_goes_first(pool: PagePool) -> None:
    low, high = running(pool, 0, 9, priority=1), running(pool, 1, 1)
    assert choose_victim([high, low], pool, 3) is low


def test_an_immune_request_of_the_lowest_class_goes_before_one_of_a_higher_class(
    pool: PagePool,
) -> None:
    low, lower = running(pool, 0, 2, num_preemptions=3, priority=5), running(pool, 1, 2, priority=5)
    high = running(pool, 2, 1)
    assert choose_victim([high, low], pool, 3) is low
    assert choose_victim([high, low, lower], pool, 3) is lower


def test_in_a_class_the_cheapest_to_recompute_goes_first(pool: PagePool) -> None:
    dear, cheap = running(pool, 1, 5), running(pool, 0, 2)
    assert choose_victim([dear, cheap], pool, 3) is cheap


def test_among_equals_the_youngest_goes_first(pool: PagePool) -> None:
    old, young = running(pool, 0, 2), running(pool, 1, 2)
    assert choose_victim([young, old], pool, 3) is young
    assert choose_victim([old, young], pool, 3) is young


def test_a_prefix_that_others_hold_costs_nothing_to_recompute(pool: PagePool) -> None:
    long = running(pool, 0, 6)
    sharer = running(pool, 1, 1, shared=long.page_table[:4])
    alone = running(pool, 2, 2)
    assert [recompute_cost(r, pool) for r in (long, sharer, alone)] == [8, 4, 8]
    assert choose_victim([long, sharer, alone], pool, 3) is sharer


def test_a_request_that_frees_no_page_is_never_the_victim(pool: PagePool) -> None:
    leader = running(pool, 0, 3)
    sharer = running(pool, 1, 0, shared=leader.page_table)
    running(pool, 2, 0, shared=leader.page_table)
    assert choose_victim([sharer], pool, 3) is None
    assert choose_victim([], pool, 3) is None


def test_who_holds_no_page_of_a_window_is_not_preempted_for_one(
    make_engine: Callable[..., GhostEngine],
) -> None:
    scheduler = make_engine(window=8, num_window_pages=9).scheduler
    request = running(scheduler.pool, 0, 2)
    assert preemption.choose_victim([request], scheduler.pool, 3) is request
    [windows] = scheduler.page_tables.ends
    assert preemption.choose_victim([request], scheduler.pool, 3, windows) is None


def test_a_request_in_flight_is_never_the_victim(pool: PagePool) -> None:
    busy, idle = running(pool, 0, 1, num_in_flight=1), running(pool, 1, 5)
    assert choose_victim([busy, idle], pool, 3) is idle
    assert choose_victim([busy], pool, 3) is None


def test_three_preemptions_make_immune(pool: PagePool) -> None:
    tired, fresh = running(pool, 1, 1, num_preemptions=3), running(pool, 0, 9, num_preemptions=2)
    assert choose_victim([tired, fresh], pool, 3) is fresh
    assert choose_victim([tired, fresh], pool, 4) is tired


def test_among_immune_requests_the_oldest_is_spared(pool: PagePool) -> None:
    old = running(pool, 0, 1, num_preemptions=3)
    young = running(pool, 1, 9, num_preemptions=5)
    assert choose_victim([old, young], pool, 3) is young


def test_a_mode_is_named_in_full() -> None:
    assert str(PreemptionMode.RECOMPUTE) == "PreemptionMode.RECOMPUTE"


@pytest.mark.parametrize("is_urgent_first", [True, False])
def test_a_shortage_of_memory_leaves_the_oldest_of_the_first_class(
    make_engine: Callable[..., GhostEngine], *, is_urgent_first: bool
) -> None:
    engine = make_engine(max_num_seqs=4)
    priorities = [0, 0, 3, 3] if is_urgent_first else [3, 3, 0, 0]
    requests = [engine.add([n] * 5, 40, priority=priority) for n, priority in enumerate(priorities)]
    for _ in range(6):
        engine.step()
    while engine.unread:
        engine.read()
    assert engine.scheduler.preemption.preempt_to(1) == 3
    oldest = requests[priorities.index(0)]
    assert list(engine.scheduler.roster.running.values()) == [oldest]
    engine.scheduler.roster.check()

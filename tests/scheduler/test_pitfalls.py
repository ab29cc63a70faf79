"""What went wrong in other engines, P1 to P15, and the test that says it does not here.

The numbers and their sources (issues of vLLM, SGLang and others) are those of the catalogue that the
scheduler was written against.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path

import pytest

from mlxserve.scheduler.preemption import PreemptionMode

TESTS = Path(__file__).parent.parent

PITFALLS: dict[str, tuple[str, ...]] = {
    "P1 a hit length that outlived its pages": (
        "scheduler/test_pitfalls.py::test_p01_a_match_does_not_outlive_an_eviction",
    ),
    "P2 admitted for a first chunk, then preempted, again and again": (
        "scheduler/test_scheduler.py"
        "::test_two_prompts_that_only_fit_one_after_the_other_do_not_thrash",
    ),
    "P3 decodes that grow preempt each other": (
        "scheduler/test_scheduler.py::test_after_a_preemption_admission_leaves_room_to_grow",
    ),
    "P4 the victim that costs most": (
        "scheduler/test_preemption.py::test_in_a_class_the_cheapest_to_recompute_goes_first",
    ),
    "P5 a victim whose pages cannot be freed": (
        "scheduler/test_preemption.py::test_whoever_frees_no_page_is_never_the_victim",
        "scheduler/test_preemption.py::test_whoever_is_in_flight_is_never_the_victim",
        "scheduler/test_scheduler.py::test_nothing_is_preempted_while_a_step_is_unread",
    ),
    "P6 whoever waits for a load holds pages behind a head without any": (
        "scheduler/test_swap.py"
        "::test_a_request_that_waits_for_the_disk_holds_its_pages_and_others_go_on",
    ),
    "P7 more admitted than there are slots": (
        "scheduler/test_pitfalls.py::test_p07_a_request_that_is_read_from_disk_takes_a_slot",
    ),
    "P8 everything waits behind a long prompt, or behind one that lacks memory": (
        "scheduler/test_scheduler.py::test_a_long_prompt_is_capped_only_while_others_could_use_the_step",
        "scheduler/test_scheduler.py::test_a_small_request_overtakes_one_that_lacks_memory_once",
    ),
    "P9 alignment leaves nothing of a chunk, and the loop ends": (
        "scheduler/test_scheduler.py"
        "::test_an_aligned_prompt_waits_for_a_page_of_budget_and_others_do_not",
    ),
    "P10 a prompt that is cached whole computes no token": (
        "scheduler/test_scheduler.py::test_a_fully_cached_prompt_computes_one_page",
    ),
    "P11 an allocation evicts what the same step matched": (
        "cache/test_pages.py::test_retained_hits_survive_the_allocation_they_justify",
        "scheduler/test_scheduler.py::test_hits_that_are_free_leave_the_free_pages_and_are_counted",
    ),
    "P12 retries and preemptions in the hit rate": (
        "scheduler/test_scheduler.py::test_hits_are_counted_once_per_admission",
    ),
    "P13 requests with a cached prefix starve those without": (
        "scheduler/test_pitfalls.py::test_p13_a_cold_request_is_not_passed_by_cached_ones",
    ),
    "P14 one that can never fit blocks the queue": (
        "scheduler/test_scheduler.py::test_a_prompt_that_can_never_fit_in_the_cache_is_refused",
        "scheduler/test_pins.py::test_what_can_never_fit_beside_the_pins_is_refused",
    ),
    "P15 hits that save nothing": (
        "scheduler/test_differential.py::test_the_cache_saves_computing",
    ),
}


@pytest.mark.parametrize("pitfall", PITFALLS)
def test_every_pitfall_has_its_tests(pitfall: str) -> None:
    assert [name.split()[0] for name in PITFALLS] == [f"P{n}" for n in range(1, 16)]
    for place in PITFALLS[pitfall]:
        file, _, name = place.partition("::")
        tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_p01_a_match_does_not_outlive_an_eviction(make_engine: Callable) -> None:
    engine = make_engine(num_pages=8, max_num_seqs=2)
    prompt = list(range(100, 117))
    engine.add(prompt, 1)
    engine.drain()
    grower = engine.add([1] * 5, 20)
    engine.step()
    late = engine.add([*prompt, *range(12)], 2)
    engine.launch()  # matches four pages; what else it needs is not free
    assert len(engine.scheduler._cache._matches[late][1]) == 4
    while not engine.scheduler.pool.num_evicted:
        assert not late.page_table
        engine.step()
    engine.drain()  # the ghost engine sees over what it attends
    assert grower.is_finished
    assert late.num_cached < 16


def test_p07_a_request_that_is_read_from_disk_takes_a_slot(make_engine: Callable) -> None:
    engine = make_engine(
        num_pages=8,
        max_num_seqs=2,
        enable_prefix_caching=False,
        preemption_mode=PreemptionMode.SWAP,
    )
    for number in range(4):
        engine.add([number] * 9, 16)
    was_reading = False
    while engine.scheduler.has_work:
        engine.step()
        was_reading |= bool(engine.loads)
        assert engine.scheduler.stats().num_running <= 2
    assert was_reading


def test_p13_a_cold_request_is_not_passed_by_cached_ones(make_engine: Callable) -> None:
    engine = make_engine(num_pages=64, max_num_seqs=1)
    prefix = list(range(100, 120))
    engine.add(prefix, 1)
    engine.drain()
    cold = engine.add([1] * 20, 2)
    for number in range(10):
        engine.add([*prefix, number], 2)
    (first,) = engine.launch()
    assert first.request is cold
    engine.drain()

"""The simulation: the real engine, and jumps that only shorten the run."""

from __future__ import annotations

from dataclasses import astuple, replace
from typing import Any

import pytest

from mlxserve.core.config import EngineConfig
from tests.perf.simulation.comparison import DEFAULTS, simulation
from tests.perf.simulation.costs import ASSUMED, CostModel
from tests.perf.simulation.simulator import Simulation, SimulationResult
from tests.perf.simulation.workloads import SCENARIOS

CHAT = replace(SCENARIOS["chat"], num_slots=6)
TIGHT = replace(CHAT, num_slots=10, pool_tokens=8192, max_context=8192)


def config(**changed: Any) -> EngineConfig:
    # Without a target prompts are computed early, and most steps can be jumped.
    return DEFAULTS.with_options(itl_target_ms=0.0, **changed)


CASES = {
    "chat": (CHAT, config()),
    "chat, few places": (CHAT, config(max_num_seqs=3)),
    "chat, too little memory": (TIGHT, config()),
    "chat, no cache": (TIGHT, config(enable_prefix_caching=False)),
    "fan-out": (SCENARIOS["fan-out"], config()),
    "bursty": (SCENARIOS["bursty"], config(page_aligned_scheduling=False)),
    "bursty, target": (SCENARIOS["bursty"], replace(config(), itl_target_ms=1000.0)),
    "bursty, whole prompts": (
        SCENARIOS["bursty"],
        config(enable_chunked_prefill=False, max_num_batched_tokens=32_768),
    ),
    "agents": (replace(SCENARIOS["agents"], num_slots=2, pool_tokens=131_072), config()),
}


@pytest.mark.parametrize("case", CASES)
def test_jumps_change_nothing_but_the_number_of_plans(case: str) -> None:
    scenario, chosen = CASES[case]
    jumped, exact = (
        simulation(scenario, chosen, ASSUMED, seed=2, num_requests=20, jumps=jumps)
        for jumps in (True, False)
    )
    ours, reference = jumped.run(), exact.run()
    assert ours.num_launched < reference.num_launched / 2
    assert ours.num_steps == reference.num_steps == reference.num_launched
    assert jumped.scheduler.stats() == exact.scheduler.stats()
    assert state(jumped) == state(exact)
    assert len(ours.records) == len(reference.records)
    for one, other in zip(ours.records, reference.records, strict=True):
        assert astuple(one) == pytest.approx(astuple(other), rel=1e-9, abs=1e-6)
    assert ours.makespan == pytest.approx(reference.makespan, rel=1e-9)


def state(simulation: Simulation) -> list[object]:
    """Each page's hash, and the order of eviction."""
    pool = simulation.pool
    simulation.scheduler.check()
    hashes = [pool.index.hash_of(page) for page in range(pool.num_pages)]
    evicted_in_order: list[object] = []
    assert pool.num_used == 0
    for _ in range(pool.num_pages):  # allocating every page shows the order of eviction
        evicted_in_order += pool.allocate(1) or []
    return [hashes, evicted_in_order]


def test_preemptions_are_simulated() -> None:
    result = simulation(TIGHT, config(), ASSUMED, seed=2, num_requests=30).run()
    assert result.preemptions > 0
    assert result.recomputed_tokens > 0


def test_the_same_seed_gives_the_same_run() -> None:
    first, second = (
        simulation(SCENARIOS["fan-out"], config(), ASSUMED, seed=1, num_requests=30).run()
        for _ in range(2)
    )
    assert first == second


def test_every_request_gets_its_whole_answer() -> None:
    run = simulation(SCENARIOS["bursty"], config(), ASSUMED, seed=1, num_requests=50)
    result = run.run()
    assert len(result.records) == 48  # 12 of each of 4 streams
    assert all(record.num_outputs > 0 for record in result.records)
    assert all(record.first_token > 0 for record in result.records)
    assert all(record.end <= result.makespan for record in result.records)
    assert not run.scheduler.has_work


def test_a_lone_request_takes_what_the_cost_model_says() -> None:
    cost = CostModel(step=1.0, prefill=0.5, prefill_context=0.0, decode=0.25, decode_context=0.125)
    lonely = replace(SCENARIOS["bursty"], num_slots=1)
    result = simulation(lonely, config(max_num_batched_tokens=32_768), cost, 0, 1).run()
    [record] = result.records
    assert record.first_token == pytest.approx(1.0 + 0.5 * record.num_prompt)
    assert record.longest_gap == pytest.approx(
        1.25 + 0.125 * (record.num_prompt + record.num_outputs - 2)
    )
    between = sum(1.25 + 0.125 * (record.num_prompt + i) for i in range(record.num_outputs - 1))
    assert record.end - record.sent - record.first_token == pytest.approx(between)


def test_a_shared_template_is_found_in_the_cache() -> None:
    fan_out = SCENARIOS["fan-out"]
    cached = simulation(fan_out, config(), ASSUMED, 0, 30).run()
    without = simulation(fan_out, config(enable_prefix_caching=False), ASSUMED, 0, 30).run()
    assert cached.hit_rate > 0.5
    assert without.hit_rate == 0
    assert cached.makespan < without.makespan


def test_a_target_shortens_the_longest_gap() -> None:
    bursty = SCENARIOS["bursty"]
    free, held = (
        simulation(bursty, replace(config(), itl_target_ms=target), ASSUMED, 0, 40).run()
        for target in (0.0, 250.0)
    )
    assert sum(r.longest_gap for r in held.records) < 0.5 * sum(r.longest_gap for r in free.records)


def test_people_do_not_wait_for_background_answers_which_all_end() -> None:
    """Six slots of background work and two people share one place."""
    scenario = replace(CHAT, num_slots=8)
    never, preempting = (
        simulation(
            scenario,
            config(max_num_seqs=1, preempt_for_priority_ms=wait),
            *(ASSUMED, 3, 40),
            num_background=6,
        ).run()
        for wait in (0.0, 200.0)
    )

    def waits(result: SimulationResult) -> list[float]:
        return sorted(one.first_token for one in result.records if one.priority == 0)

    assert len(never.records) == len(preempting.records)
    assert len(waits(preempting)) == len(waits(never)) > 5
    assert sum(waits(preempting)) < 0.6 * sum(waits(never))
    assert preempting.makespan < 1.1 * never.makespan

"""Workloads: the same turns for every scheduler, with prompts that grow as real ones do."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from mlxserve.core.errors import InvalidConfig
from mlxserve.request import LiveRequest
from tests.perf.simulation.costs import ASSUMED, CostModel
from tests.perf.simulation.workloads import (
    SCENARIOS,
    AgentsWorkload,
    BurstyWorkload,
    Session,
    SimulatedRequest,
    SimulatedWorkload,
    find_scenario,
    symbols,
)

NAMES = list(SCENARIOS)


def play(workload: SimulatedWorkload, shuffle: int) -> list[tuple[int, int, int]]:
    """(slot, prompt, answer) of every turn, answered in a random order."""
    draw = random.Random(shuffle)
    pending: list[SimulatedRequest] = []
    seen, now = [], 0.0
    fresh = workload.begin()
    while pending or fresh:
        for turn in fresh:
            pending.append(turn)
            max_tokens = turn.request.params.max_tokens
            assert max_tokens is not None
            seen.append((turn.session.slot, turn.request.num_prompt, max_tokens))
        fresh = [later for turn in fresh for later in workload.arrived(turn)]
        if fresh:
            continue
        turn = pending.pop(draw.randrange(len(pending)))
        now = max(now, turn.time) + draw.random()
        fresh = workload.finished(turn, answered(turn), now)
    return sorted(seen)


def answered(turn: SimulatedRequest) -> LiveRequest:
    max_tokens = turn.request.params.max_tokens
    assert max_tokens is not None
    request = LiveRequest(turn.request)
    request.token_ids.extend([0] * max_tokens)
    return request


@pytest.mark.parametrize("name", NAMES)
def test_the_turns_do_not_depend_on_the_order_of_answers(name: str) -> None:
    scenario = SCENARIOS[name]
    first = play(scenario.make(seed=3, num_requests=150, cost=ASSUMED), shuffle=1)
    assert len(first) > 50
    assert first == play(scenario.make(seed=3, num_requests=150, cost=ASSUMED), shuffle=2)
    assert first != play(scenario.make(seed=4, num_requests=150, cost=ASSUMED), shuffle=1)


@pytest.mark.parametrize("name", NAMES)
def test_every_turn_fits_into_the_context(name: str) -> None:
    scenario = SCENARIOS[name]
    for _, prompt, tokens in play(scenario.make(seed=0, num_requests=600, cost=ASSUMED), 0):
        assert prompt > 0
        assert tokens > 0
        assert prompt + tokens <= scenario.max_context


@pytest.mark.parametrize("name", NAMES)
def test_about_as_many_requests_come_as_were_asked_for(name: str) -> None:
    turns = play(SCENARIOS[name].make(seed=0, num_requests=2000, cost=ASSUMED), 0)
    assert 0.7 * 2000 < len(turns) < 1.4 * 2000


def test_agents_begin_at_12000_tokens_and_keep_their_context() -> None:
    workload = SCENARIOS["agents"].make(seed=0, num_requests=200, cost=ASSUMED)
    assert isinstance(workload, AgentsWorkload)
    first = workload.begin()[0]
    assert 10_240 < first.request.num_prompt < 31_000
    told = list(first.request.token_ids)
    [second, *_] = workload.finished(first, answered(first), 1.0)
    assert [*second.request.token_ids[: len(told)]] == told
    assert len(list(symbols(second.request.token_ids))) >= 4  # template, task, answer, result


def test_a_full_agent_context_is_compacted_to_the_template_and_a_summary() -> None:
    scenario = SCENARIOS["agents"]
    workload = scenario.make(seed=1, num_requests=1500, cost=ASSUMED)
    prompts: dict[Session, list[int]] = {}
    pending = workload.begin()
    while pending:
        turn = pending.pop(0)
        prompts.setdefault(turn.session, []).append(turn.request.num_prompt)
        pending += workload.finished(turn, answered(turn), turn.time + 1)
    drops = [(a, b) for told in prompts.values() for a, b in pairwise(told) if b < a]
    assert drops
    for before, after in drops:
        assert before > 60_000  # the last message may have 30,000 tokens
        assert 20_000 < after < 51_000


def test_the_questions_of_a_job_share_its_text_and_come_together() -> None:
    turns = SCENARIOS["fan-out"].make(seed=0, num_requests=40, cost=ASSUMED).begin()
    slots = {turn.session.slot for turn in turns}
    assert len(slots) == SCENARIOS["fan-out"].num_slots
    for slot in slots:
        job = [turn for turn in turns if turn.session.slot == slot]
        assert 2 <= len(job) <= 8
        assert len({turn.time for turn in job}) == 1
        prefixes = {tuple(symbols(turn.request.token_ids))[:2] for turn in job}
        assert len(prefixes) == 1
        assert len({tuple(symbols(turn.request.token_ids)) for turn in job}) == len(job)


def test_bursts_scale_with_the_speed_of_the_machine() -> None:
    slow = CostModel(*(10 * value for value in (0.01, 1e-3, 1e-8, 1e-3, 1e-7)))
    fast = CostModel(0.01, 1e-3, 1e-8, 1e-3, 1e-7)
    ends = []
    for cost in (slow, fast):
        workload = SCENARIOS["bursty"].make(seed=0, num_requests=200, cost=cost)
        assert isinstance(workload, BurstyWorkload)
        pending, last = workload.begin(), 0.0
        while pending:
            turn = pending.pop()
            last = max(last, turn.time)
            pending += workload.arrived(turn)
        ends.append(last)
    assert ends[0] == pytest.approx(10 * ends[1])


def test_an_unknown_workload_is_refused_with_the_known_ones() -> None:
    with pytest.raises(InvalidConfig, match="chat, fan-out, agents, bursty"):
        find_scenario("unknown")

"""The simulation of many servers: what must hold whatever the policy, and what each policy is for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from tests.perf.cli import app
from tests.perf.simulation.costs import ASSUMED
from tests.perf.simulation.fleet.fleet import FleetConfig, FleetResult, FleetSimulation
from tests.perf.simulation.fleet.machines import PAGE, TOKEN_BYTES, Memory, Server, Store
from tests.perf.simulation.fleet.plot import figure
from tests.perf.simulation.fleet.routing import POLICIES, KvAware, Load
from tests.perf.simulation.fleet.runs import LINES
from tests.perf.simulation.fleet.sessions import TEMPLATE, Agents, Chain, Turn

SMALL = FleetConfig("kv_aware", 4, warm_up=100.0, seconds=200.0)


def run(**changes: object) -> FleetResult:
    return FleetSimulation(replace(SMALL, **changes)).run()  # type: ignore[arg-type]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_run_repeats_and_finds_no_more_than_there_was(policy: str) -> None:
    result = run(policy=policy)
    again = run(policy=policy)
    assert (result.waits, result.by_server) == (again.waits, again.by_server)
    assert result.num_requests == sum(result.by_server) > 40
    # Templates count as found, and are known from other sessions.
    templates = result.num_requests * TEMPLATE
    assert 0 < result.cached_tokens <= result.known_tokens + templates
    assert min(result.waits) >= 0
    assert result.store_tokens == 0


def test_sessions_that_stay_find_more_than_those_that_take_turns() -> None:
    shares = {policy: run(policy=policy).share for policy in POLICIES}
    assert shares["round_robin"] < 0.7
    assert shares["kv_aware, sessions"] > shares["round_robin"] + 0.2
    assert shares["consistent_hash"] > shares["round_robin"] + 0.2


def test_a_store_gives_what_another_server_has() -> None:
    alone, shared = (
        run(policy="round_robin"),
        run(policy="round_robin", store_bytes_per_second=1e10),
    )
    assert shared.share > alone.share + 0.2
    assert shared.store_tokens > 0
    assert shared.bytes_read == shared.store_tokens * TOKEN_BYTES
    slow = run(policy="round_robin", store_bytes_per_second=1e7)
    assert slow.bytes_refused > 0
    assert slow.share < shared.share


def test_after_a_failure_everything_is_answered_by_others() -> None:
    result = run(policy="kv_aware", failure_seconds=60.0, down_seconds=20.0)
    assert result.num_again > 5
    assert result.num_requests > 50
    gone = run(policy="round_robin", num_servers=1, failure_seconds=60.0, down_seconds=20.0)
    assert gone.num_requests > 10, "one server comes back"


def test_events_are_heard_late() -> None:
    load = Load(2)
    router = KvAware(2, load, delay=0.1)
    [turn, *_] = Agents(1, seed=0).begin()
    load.tokens[:] = 0.0, 1.0
    router.kept(1, turn.session.chain, turn.prompt, now=10.0)
    assert router.choose(turn, now=10.05) == 0
    assert router.choose(turn, now=10.11) == 1
    load.tokens[1] = turn.prompt
    assert router.choose(turn, now=10.2) == 0, "that one is too busy"
    router.failed(1)
    load.tokens[:] = 0.0
    assert router.choose(turn, now=10.3) == 0


def test_memory_keeps_the_last_used_and_a_template_once() -> None:
    memory = Memory(TEMPLATE + 3000)
    chains = [Chain(number, 0) for number in range(3)]
    for chain in chains[:2]:
        assert memory.keep(chain, TEMPLATE + 1000) == []
    assert memory.length(chains[2]) == TEMPLATE
    child = Chain(3, 0, chains[0], TEMPLATE + 600)
    assert memory.length(child) == TEMPLATE + 600
    assert memory.keep(chains[0], TEMPLATE + 2500) == [1]
    assert memory.length(chains[1]) == TEMPLATE
    memory.clear()
    assert memory.length(chains[0]) == 0


def test_a_link_reads_one_after_another_and_refuses_writes_when_behind() -> None:
    store = Store(capacity=1 << 20, bytes_per_second=PAGE * TOKEN_BYTES)
    chain = Chain(0, 0)
    store.write(chain, PAGE, now=0.0)
    assert store.busy_until == pytest.approx(1.0)
    store.read(PAGE, now=0.0)
    assert store.ready_at(PAGE, now=0.5) == pytest.approx(3.0)
    store.write(chain, 2 * PAGE, now=0.5)
    assert store.bytes_refused == PAGE * TOKEN_BYTES
    assert store.memory.length(chain) == PAGE


def test_answers_side_by_side_take_longer() -> None:
    server = Server(0, ASSUMED, 1 << 20)
    [session] = [turn.session for turn in Agents(1, seed=0).begin()]
    turn = Turn(0.0, session, prompt=20_000, answer=100)
    first = server.begin_answer(turn)
    assert server.begin_answer(turn) > first
    server.end_answer(turn)
    server.end_answer(turn)
    assert server.begin_answer(turn) == first
    assert server.prefill_seconds(1000, 20_000) > server.prefill_seconds(1000, 0)


def test_the_plot_has_a_line_for_each_policy() -> None:
    results = [
        FleetSimulation(replace(SMALL, policy=policy, num_servers=size, seconds=60.0)).run()
        for policy in POLICIES
        for size in (1, 3)
    ]
    root = ElementTree.fromstring(figure(results))
    lines = root.findall(".//{http://www.w3.org/2000/svg}polyline")
    assert len(lines) == 2 * len(POLICIES)
    texts = [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")]
    assert set(POLICIES) < set(texts)


def test_the_command_writes_the_plot(tmp_path: Path) -> None:
    out = tmp_path / "fleet.svg"
    arguments = ["fleet", "--servers", "1", "--servers", "2", "--seconds", "30", "--plot", str(out)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert out.read_text().count("<polyline") == 2 * len(LINES)
    assert "kv_aware, sessions + store" in out.read_text()

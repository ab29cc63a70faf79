"""Sessions of Claude Code, Codex and opencode that go on: resumed, interrupted, compacted, with agents of their own."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from tests.clients.agent_server import Unfinished, agent_server, num_results
from tests.clients.coding_agents import CODING_AGENTS, SECONDS, Workplace, agent_run
from tests.clients.compaction import COMPACT
from tests.waiting import wait_until

pytestmark = [pytest.mark.clients, pytest.mark.parametrize("name", CODING_AGENTS)]

RULE = "qwen 3.5"
FIRST, MORE, SECOND = "Remember the violet door.", "Say it again.", "Which door was it?"
DELEGATED = "Read the small text."
DONE = "All of it is done."


def test_a_resumed_session_continues_its_prompt(
    name: str, workplace: Workplace, model: Path
) -> None:
    with agent_server(model, RULE, lambda _: DONE) as server:
        run = agent_run(name, server, workplace)
        run.start(FIRST)
        assert DONE in run.resume(SECOND)
        before, after = run.own_prompts
    assert after.startswith(before.removesuffix("assistant\n").rstrip())
    assert after.index(FIRST) < after.index(DONE) < after.index(SECOND)


def test_an_interrupted_answer_is_ended_and_its_session_resumed(
    name: str, workplace: Workplace, model: Path
) -> None:
    agent = CODING_AGENTS[name]

    def answer(prompt: str) -> str:
        if SECOND in prompt:
            return DONE
        if num_results(prompt) and agent.tool in prompt:
            return Unfinished("It is a long story")
        return agent.read(workplace.project / "a.txt") if agent.tool in prompt else "A title"

    with agent_server(model, RULE, answer) as server:
        run = agent_run(name, server, workplace)
        with run.process([*agent.arguments, FIRST]) as process:
            wait_until(lambda: server.engine.num_unfinished, SECONDS)
            process.send_signal(signal.SIGINT)
            wait_until(lambda: server.engine.ends, complaint="the request was not aborted")
            process.communicate()
        assert DONE in run.resume(SECOND)
        prompt = run.own_prompts[-1]
    assert prompt.index(FIRST) < prompt.index("alpha") < prompt.index(SECOND)


def test_a_session_that_was_compacted_by_hand_continues_with_its_summary(
    name: str, workplace: Workplace, model: Path
) -> None:
    agent = CODING_AGENTS[name]
    summary = "<summary>There was a door of some colour.</summary>"

    def answer(prompt: str) -> str:
        return summary if agent.compacts in prompt[-8_000:] else DONE

    with agent_server(model, RULE, answer) as server:
        run = agent_run(name, server, workplace)
        run.start(FIRST)
        run.resume(MORE)  # Claude Code has too few messages to compact before it
        COMPACT[name](run)
        assert DONE in run.resume(SECOND)
        prompt = run.own_prompts[-1]
    assert "There was a door" in prompt
    assert SECOND in prompt
    assert prompt.count(DONE) < 2  # Claude Code keeps the newest answer beside its summary


def test_an_agent_of_its_own_answers_the_main_conversation(
    name: str, workplace: Workplace, model: Path
) -> None:
    agent = CODING_AGENTS[name]

    def answer(prompt: str) -> str:
        done = num_results(prompt)
        if FIRST not in prompt:
            return "It says alpha." if done else agent.read(workplace.project / "a.txt")
        if agent.tool not in prompt:
            return "A title"
        if done == len(agent.delegate):
            return DONE
        started = re.search(r'"agent_id":"([^"]+)"', prompt)
        return agent.delegate[done](started[1] if started else DELEGATED)

    with agent_server(model, RULE, answer) as server:
        run = agent_run(name, server, workplace)
        assert DONE in run.start(FIRST)
        own = [prompt for prompt in server.prompts if FIRST not in prompt]
        main = run.own_prompts[-1]
    assert [num_results(prompt) for prompt in own] == [0, 1]
    assert all(DELEGATED in prompt for prompt in own)
    assert "alpha" in own[1]
    assert "It says alpha." in main


def test_an_image_that_a_tool_reads_reaches_a_model_that_sees(
    name: str, workplace: Workplace, model: Path
) -> None:
    agent = CODING_AGENTS[name]

    def answer(prompt: str) -> str:
        if agent.tool not in prompt:
            return "A title"
        return DONE if num_results(prompt) else agent.look(workplace.project / "p.png")

    with agent_server(model, RULE, answer, sees=True) as server:
        run = agent_run(name, server, workplace, sees=True)
        assert DONE in run.start(FIRST)
        prompt = run.own_prompts[-1]
    assert prompt.index("<tool_response>") < prompt.index("[image of 1 x 1 pixels]")

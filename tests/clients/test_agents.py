"""Claude Code, Codex and opencode as programs, with the rules of public templates.

They come from npm and must be on the PATH:

    npm install --prefix clients @anthropic-ai/claude-code @openai/codex opencode-ai
    PATH=$PWD/clients/node_modules/.bin:$PATH uv run pytest -m clients
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest

from mlxserve.cli.agents import AGENTS, AgentTarget
from tests.clients.agent_server import AgentServer, agent_server, num_results
from tests.clients.coding_agents import CODING_AGENTS, Workplace, agent_run
from tests.text.effort_rules import SHOWN
from tests.text.template_rules import GUARDS

pytestmark = pytest.mark.clients

LONG = "python3 -c \"print('word ' * 5500)\""  # more tokens than an agent's prompt leaves
SUMMARY = "<summary>The user wants long output. It was seen.</summary>"
DONE = "All of it is done."
TASK = "Read a.txt and p.png, and write b.txt."


def run(
    name: str,
    server: AgentServer,
    workplace: Workplace,
    context: int = 0,
    options: Sequence[str] = (),
) -> None:
    """Until the agent is done."""
    assert DONE in agent_run(name, server, workplace, context=context).start(TASK, options)


@pytest.mark.parametrize("rule", GUARDS)
@pytest.mark.parametrize("name", CODING_AGENTS)
def test_a_loop_of_three_calls_with_an_image_is_answered(
    name: str, rule: str, workplace: Workplace, model: Path
) -> None:
    client = CODING_AGENTS[name]

    def answer(prompt: str) -> str:
        if client.tool not in prompt:
            return "A title"
        steps = [
            client.read(workplace.project / "a.txt"),
            client.look(workplace.project / "p.png"),
            client.shell("echo beta > b.txt"),
        ]
        done = num_results(prompt)
        return steps[done] if done < len(steps) else DONE

    with agent_server(model, rule, answer) as server:
        run(name, server, workplace)
    assert (workplace.project / "b.txt").read_text() == "beta\n"
    session = [prompt for prompt in server.prompts if client.tool in prompt]
    assert [num_results(prompt) for prompt in session] == [0, 1, 2, 3]
    assert "alpha" in session[-1]
    assert client.instead_of_an_image in session[-1]
    for shorter, longer in pairwise(session[1:]):
        assert longer.startswith(shorter.removesuffix("assistant\n").rstrip())


@pytest.mark.parametrize("rule", GUARDS)
@pytest.mark.parametrize("name", CODING_AGENTS)
def test_a_conversation_that_is_too_long_is_compacted(
    name: str, rule: str, workplace: Workplace, model: Path
) -> None:
    client = CODING_AGENTS[name]

    def answer(prompt: str) -> str | None:
        if client.compacts in prompt[-4_000:]:
            return SUMMARY
        if client.tool not in prompt:
            return "A title"
        if "It was seen." in prompt:
            return DONE
        if num_results(prompt) >= 2:
            return None
        return client.shell(LONG)

    with agent_server(model, rule, answer) as server:
        run(name, server, workplace, client.context or 0)
    assert client.context is not None or server.engine.num_refused >= 1
    assert any("It was seen." in prompt for prompt in server.prompts)


# The efforts that users of each agent can choose; None is the agent's default.
EFFORTS = {
    "claude": (None, "low", "medium", "high", "xhigh", "max"),
    "codex": (None, "minimal", "low", "medium", "high", "xhigh"),
}


@pytest.mark.parametrize("rule", ["qwen 3.8", "hy 3"])
@pytest.mark.parametrize(
    ("name", "level"), [(name, level) for name, levels in EFFORTS.items() for level in levels]
)
def test_each_effort_is_answered(
    name: str, level: str | None, rule: str, workplace: Workplace, model: Path
) -> None:
    """Qwen3.8's template raises for `high`, which Claude Code sends by default."""
    client = CODING_AGENTS[name]
    assert client.effort is not None
    with agent_server(model, rule, lambda _: DONE) as server:
        options = () if level is None else client.effort(level)
        run(name, server, workplace, options=options)
    session = [prompt for prompt in server.prompts if client.tool in prompt]
    assert session
    if level is not None:
        assert all(SHOWN[rule][level] in prompt for prompt in session)


def test_the_settings_of_the_agents_are_those_of_launch() -> None:
    target = AgentTarget("http://127.0.0.1:1", "local", 40_000)
    assert AGENTS["claude"].session(target).environment["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == "40000"
    assert "model_context_window=40000" in AGENTS["codex"].session(target).command
    settings = json.loads(AGENTS["opencode"].session(target).environment["OPENCODE_CONFIG_CONTENT"])
    assert settings["provider"]["mlxserve"]["models"]["local"]["limit"]["context"] == 40_000

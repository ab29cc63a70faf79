"""Agents that `mlxserve launch` does not start, with the settings that docs/agents.md gives for them.

Cline and qwen-code come from npm, aider from PyPI, in an environment of its own:

    npm install --prefix clients cline @qwen-code/qwen-code
    uv tool install aider-chat
    PATH=$PWD/clients/node_modules/.bin:$PATH uv run pytest -m clients
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tests.clients.agent_server import agent_server, call, num_results
from tests.clients.coding_agents import Workplace, needs

pytestmark = pytest.mark.clients

RULE = "qwen 3.5"
DONE = "All of it is done."
TASK = "Read a.txt and write b.txt."


def finishes_a_loop(
    workplace: Workplace, model: Path, calls: Sequence[str], commands: Sequence[Sequence[str]]
) -> None:
    """Run the commands, the last of which gets the task; URL stands for the server's address."""

    def answer(prompt: str) -> str:
        return [*calls, DONE][num_results(prompt)]

    with agent_server(model, RULE, answer) as server:
        for command in commands:
            ended = workplace.run([word.replace("URL", server.url) for word in command], {})
            assert ended.returncode == 0, ended.stdout[-2_000:] + ended.stderr[-2_000:]
        assert [num_results(prompt) for prompt in server.prompts] == [0, 1, 2]
        assert "alpha" in server.prompts[-1]
    assert DONE in ended.stdout
    assert (workplace.project / "b.txt").read_text() == "beta\n"


def test_cline_finishes_a_tool_loop(workplace: Workplace, model: Path) -> None:
    needs("cline", "cline")
    provider = ("--provider", "openai-compatible")
    calls = (
        call("read_files", files=[{"path": str(workplace.project / "a.txt")}]),
        call("run_commands", commands=["echo beta > b.txt"]),
    )
    settings = ("--apikey", "none", "--modelid", "local", "--baseurl", "URL/v1")
    commands = (
        ("cline", "auth", *provider, *settings),
        ("cline", *provider, "--model", "local", TASK),
    )
    try:
        finishes_a_loop(workplace, model, calls, commands)
    finally:
        workplace.run(["cline", "hub", "stop"], {})  # a process that outlives its commands


def test_qwen_code_finishes_a_tool_loop(workplace: Workplace, model: Path) -> None:
    needs("qwen", "@qwen-code/qwen-code")
    calls = (
        call("read_file", file_path=str(workplace.project / "a.txt")),
        call("run_shell_command", command="echo beta > b.txt", is_background=False),
    )
    server = ("--openai-base-url", "URL/v1", "--openai-api-key", "none", "--model", "local")
    finishes_a_loop(
        workplace, model, calls, [("qwen", "--yolo", "--auth-type", "openai", *server, "-p", TASK)]
    )


# It asks for no update, price or release note, which are on the internet.
_OFFLINE: Mapping[str, str] = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
_QUIET = (
    "--no-check-update",
    "--no-analytics",
    "--no-show-model-warnings",
    "--no-show-release-notes",
    "--no-git",
    "--yes-always",
)


def test_aider_edits_a_file(workplace: Workplace, model: Path) -> None:
    """Its edits are texts, in a stream, and no calls."""
    needs("aider", "aider-chat")
    text = "I change it.\n\na.txt\n```\nbeta\n```\n"
    with agent_server(model, RULE, lambda _: text) as server:
        variables = {**_OFFLINE, "OPENAI_API_BASE": f"{server.url}/v1", "OPENAI_API_KEY": "none"}
        command = ("aider", "--model", "openai/local", *_QUIET, "--message", "Make it beta.")
        ended = workplace.run([*command, "a.txt"], variables)
        assert ended.returncode == 0, ended.stdout[-2_000:] + ended.stderr[-2_000:]
        assert "alpha" in server.prompts[0]
    assert (workplace.project / "a.txt").read_text() == "beta\n"

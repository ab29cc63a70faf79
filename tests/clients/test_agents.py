"""Claude Code, Codex and opencode as programs, with the rules of public templates.

They come from npm and must be on the PATH:

    npm install --prefix clients @anthropic-ai/claude-code @openai/codex opencode-ai
    PATH=$PWD/clients/node_modules/.bin:$PATH uv run pytest -m clients
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest

from mlxserve.cli.agents import AGENTS, AgentTarget
from tests.clients.agent_server import AgentServer, agent_server, call, num_results
from tests.text.effort_rules import SHOWN
from tests.text.template_rules import GUARDS

pytestmark = pytest.mark.clients

SECONDS = 180  # for a session, most of which is the agent's own start
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
LONG = "python3 -c \"print('word ' * 5500)\""  # more tokens than an agent's prompt leaves
SUMMARY = "<summary>The user wants long output. It was seen.</summary>"
DONE = "All of it is done."
TASK = "Read a.txt and p.png, and write b.txt."


@dataclass(frozen=True)
class Client:
    """
    arguments: after those of `mlxserve launch`; the last one is the task
    shell, read, look: calls that run a command, read a text and look at an image
    tool: a name that only the main conversation's tools have
    compacts: what only the request for a summary says
    context: in which two long results do not fit, where the agent counts by itself
    effort: the arguments that set one
    instead_of_an_image: what the model gets of one, ours or the agent's
    """

    arguments: Sequence[str]
    shell: Callable[[str], str]
    read: Callable[[Path], str]
    look: Callable[[Path], str]
    tool: str
    compacts: str
    context: int | None = None
    effort: Callable[[str], Sequence[str]] | None = None
    instead_of_an_image: str = "[image left out: this model reads text only]"


CLIENTS = {
    "claude": Client(
        ("--dangerously-skip-permissions", "-p"),
        lambda command: call("Bash", command=command, description="Run it"),
        lambda path: call("Read", file_path=str(path)),
        lambda path: call("Read", file_path=str(path)),
        '"name": "Bash"',
        "Do NOT call any tools",
        effort=lambda level: ("--effort", level),
    ),
    "codex": Client(
        ("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"),
        lambda command: call("exec_command", cmd=command, max_output_tokens=20_000),
        lambda path: call("exec_command", cmd=f"cat {path}"),
        lambda path: call("view_image", path=str(path)),
        '"name": "exec_command"',
        "CONTEXT CHECKPOINT COMPACTION",
        context=28_000,
        effort=lambda level: ("-c", f"model_reasoning_effort={level}"),
    ),
    "opencode": Client(
        ("run",),
        lambda command: call("bash", command=command, description="Run it"),
        lambda path: call("read", filePath=str(path)),
        lambda path: call("read", filePath=str(path)),
        '"name": "bash"',
        "summary process or that context was compacted",
        instead_of_an_image="Cannot read image (this model does not support image input)",
    ),
}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder for the agent to work in, with a text and an image."""
    found = tmp_path / "project"
    found.mkdir()
    (found / "a.txt").write_text("alpha\n")
    (found / "p.png").write_bytes(base64.b64decode(PIXEL))
    return found


@pytest.fixture
def model(tmp_path: Path) -> Path:
    found = tmp_path / "model"
    found.mkdir()
    return found


def run(
    name: str, server: AgentServer, project: Path, context: int, options: Sequence[str] = ()
) -> None:
    """Until the agent is done. opencode ends with an error even if it has gone on after a refusal."""
    target = AgentTarget(server.url, "local", context)
    session = AGENTS[name].session(target)
    kept = {key: value for key, value in os.environ.items() if key not in session.without}
    home = project.parent / "home"
    home.mkdir()
    ended = subprocess.run(
        [*session.command, *options, *CLIENTS[name].arguments, TASK],
        cwd=project,
        env={
            **kept,
            **session.environment,
            "HOME": str(home),
            "PWD": str(project),
            "IS_SANDBOX": "1",  # Claude Code asks for it where it runs as root
            "DISABLE_AUTOUPDATER": "1",
            "OPENCODE_DISABLE_AUTOUPDATE": "1",
            "OPENCODE_DISABLE_MODELS_FETCH": "1",
        },
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert DONE in ended.stdout, ended.stdout[-2_000:] + ended.stderr[-2_000:]
    assert ended.returncode == 0 or server.engine.num_refused


@pytest.mark.parametrize("rule", GUARDS)
@pytest.mark.parametrize("name", CLIENTS)
def test_a_loop_of_three_calls_with_an_image_is_answered(
    name: str, rule: str, project: Path, model: Path
) -> None:
    client = CLIENTS[name]

    def answer(prompt: str) -> str:
        if client.tool not in prompt:
            return "A title"
        steps = [
            client.read(project / "a.txt"),
            client.look(project / "p.png"),
            client.shell("echo beta > b.txt"),
        ]
        done = num_results(prompt)
        return steps[done] if done < len(steps) else DONE

    with agent_server(model, rule, answer) as server:
        run(name, server, project, server.engine.max_model_len)
    assert (project / "b.txt").read_text() == "beta\n"
    session = [prompt for prompt in server.prompts if client.tool in prompt]
    assert [num_results(prompt) for prompt in session] == [0, 1, 2, 3]
    assert "alpha" in session[-1]
    assert client.instead_of_an_image in session[-1]
    for shorter, longer in pairwise(session[1:]):
        assert longer.startswith(shorter.removesuffix("assistant\n").rstrip())


@pytest.mark.parametrize("rule", GUARDS)
@pytest.mark.parametrize("name", CLIENTS)
def test_a_conversation_that_is_too_long_is_compacted(
    name: str, rule: str, project: Path, model: Path
) -> None:
    client = CLIENTS[name]

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
        context = client.context or server.engine.max_model_len
        run(name, server, project, context)
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
    name: str, level: str | None, rule: str, project: Path, model: Path
) -> None:
    """Qwen3.8's template raises for `high`, which Claude Code sends by default."""
    client = CLIENTS[name]
    assert client.effort is not None
    with agent_server(model, rule, lambda _: DONE) as server:
        options = () if level is None else client.effort(level)
        run(name, server, project, server.engine.max_model_len, options)
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

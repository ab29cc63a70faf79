"""Agents get the server's settings for one session, or permanently; --undo restores the old ones."""

from __future__ import annotations

import json
import os
import shlex
import stat
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from mlxserve.cli.agents import AGENTS, AgentTarget, agent_effort
from mlxserve.cli.running_servers import registered
from tests.cli.commands import Run
from tests.cli.recording_server import RecordingServer

TARGET = AgentTarget("http://127.0.0.1:8000", "org/model", 64_000)
LOCKED = AgentTarget("http://127.0.0.1:8000", "org/model", 64_000, key="secret-key")
CARD = {"id": "org/model", "aliases": ["default"], "max_model_len": 64_000}


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    for name in ("CLAUDE_CONFIG_DIR", "CODEX_HOME", "MLXSERVE_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / ".config"))
    return tmp_path


@pytest.fixture
def launch(run: Run, monkeypatch: pytest.MonkeyPatch, server: RecordingServer, home: Path) -> Run:
    """A function that runs `mlxserve launch` against the server."""
    assert home.exists()
    monkeypatch.setenv("MLXSERVE_URL", server.url)
    server.answer({"data": [CARD]})
    return lambda *args, **options: run("launch", *args, **options)


def files_of(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): path.read_text()
        for path in folder.rglob("*")
        if path.is_file()
    }


# ---- settings of each agent


def test_claude_gets_every_model_name_and_not_the_key_of_the_real_service(home: Path) -> None:
    session = AGENTS["claude"].session(LOCKED)
    assert session.environment["ANTHROPIC_BASE_URL"] == "http://127.0.0.1:8000"
    assert session.environment["ANTHROPIC_AUTH_TOKEN"] == "secret-key"
    names = [name for name in session.environment if name.endswith("MODEL")]
    assert len(names) == 4
    assert {session.environment[name] for name in names} == {"org/model"}
    assert session.without == ("ANTHROPIC_API_KEY",)


@pytest.mark.parametrize("target", [TARGET, LOCKED])
def test_codex_gets_the_same_settings_by_flags_and_by_its_profile(
    home: Path, target: AgentTarget
) -> None:
    codex = AGENTS["codex"]
    session = codex.session(target)
    flags = session.command[session.command.index("-c") :: 2]
    overrides = session.command[session.command.index("-c") + 1 :: 2]
    assert set(flags) == {"-c"}
    by_flags = tomllib.loads("\n".join(overrides))
    by_file = tomllib.loads(codex.configured("", target))
    assert by_file.pop("model") == session.command[session.command.index("--model") + 1]
    assert by_flags == by_file
    provider = by_file["model_providers"]["mlxserve"]
    assert provider["wire_api"] == "responses"
    assert provider["base_url"] == "http://127.0.0.1:8000/v1"
    assert ("env_key" in provider) == (target.key is not None)
    assert "secret-key" not in "".join(session.command)


def test_opencode_keeps_its_other_settings(home: Path) -> None:
    opencode = AGENTS["opencode"]
    had = {"theme": "x", "provider": {"other": {"npm": "y"}}}
    settings = json.loads(opencode.configured(json.dumps(had), LOCKED))
    assert settings["theme"] == "x"
    assert set(settings["provider"]) == {"other", "mlxserve"}
    assert settings["model"] == "mlxserve/org/model"
    assert "secret-key" not in json.dumps(settings)
    inline = json.loads(opencode.session(TARGET).environment["OPENCODE_CONFIG_CONTENT"])
    assert inline["provider"]["mlxserve"]["models"]["org/model"]["limit"]["context"] == 64_000


def test_an_agent_asks_for_an_effort_that_the_model_knows(home: Path) -> None:
    for efforts, expected in [
        ((), None),
        (("low", "high", "max"), None),
        (("low", "medium", "xhigh"), "xhigh"),
        (("low", "medium"), "medium"),
        (("max",), "max"),
    ]:
        assert agent_effort(efforts) == expected, efforts
    target = replace(TARGET, effort="xhigh")
    claude = AGENTS["claude"]
    assert claude.session(target).command == ("claude", "--effort", "xhigh")
    assert claude.session(TARGET).command == ("claude",)
    assert json.loads(claude.configured("", target))["effortLevel"] == "xhigh"
    chosen = json.loads(claude.configured('{"effortLevel": "low"}', target))
    assert chosen["effortLevel"] == "low"
    codex = AGENTS["codex"]
    assert 'model_reasoning_effort="xhigh"' in codex.session(target).command
    for effort, level in [("xhigh", "xhigh"), ("max", "xhigh")]:
        configured = tomllib.loads(codex.configured("", replace(TARGET, effort=effort)))
        assert configured["model_reasoning_effort"] == level
    opencode = json.loads(AGENTS["opencode"].configured("", target))
    model = opencode["provider"]["mlxserve"]["models"]["org/model"]
    assert model["options"] == {"reasoningEffort": "xhigh"}


# ---- one session


def test_the_effort_is_chosen_from_those_that_the_server_lists(
    launch: Run, server: RecordingServer
) -> None:
    for efforts, flag in [(["low", "medium", "xhigh"], True), (["low", "high"], False)]:
        server.answer({"data": [{**CARD, "thinking": {"efforts": efforts}}]})
        assert ("--effort xhigh" in launch("claude", "--dry-run")[1]) is flag


def test_opencode_sends_images_to_a_model_that_the_server_lists_as_seeing(
    launch: Run, server: RecordingServer
) -> None:
    for capabilities, sees in [(["completion", "vision"], True), (["completion"], False)]:
        server.answer({"data": [{**CARD, "capabilities": capabilities}]})
        assert ('"input": ["text", "image"]' in launch("opencode", "--dry-run")[1]) is sees


@pytest.mark.parametrize("agent", list(AGENTS))
def test_a_dry_run_shows_a_script_and_writes_nothing(launch: Run, home: Path, agent: str) -> None:
    code, out, err = launch(agent, "--dry-run", "--model", "default", "--", "-p", "a question")
    assert (code, err) == (0, "")
    assert shlex.split(out.splitlines()[-1])[0] == agent
    assert out.rstrip().endswith("-p 'a question'")
    assert files_of(home) == {}
    checked = subprocess.run(["bash", "-n"], input=out, text=True, capture_output=True)
    assert (checked.returncode, checked.stderr) == (0, "")


def test_a_dry_run_does_not_show_the_key(launch: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLXSERVE_API_KEY", "secret-key")
    for agent in AGENTS:
        assert "secret-key" not in launch(agent, "--dry-run")[1]
        assert "secret-key" not in launch(agent, "--dry-run", "--install")[1]


def test_the_agent_is_started_with_the_servers_settings(
    server: RecordingServer, home: Path
) -> None:
    program = home / "bin" / "claude"
    program.parent.mkdir()
    program.write_text('#!/bin/sh\necho "$ANTHROPIC_BASE_URL $ANTHROPIC_API_KEY- $*"\nexit 7\n')
    program.chmod(0o755)
    server.answer({"data": [CARD]})
    env = {**os.environ, "PATH": f"{program.parent}:{os.environ['PATH']}", "ANTHROPIC_API_KEY": "x"}
    command = [
        sys.executable,
        "-m",
        "mlxserve",
        "launch",
        "claude",
        "--url",
        server.url,
        "--",
        "-p",
    ]
    result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout, result.stderr) == (7, f"{server.url} - -p\n", "")


def test_a_missing_agent_is_reported_with_its_install_command(
    launch: Run, monkeypatch: pytest.MonkeyPatch, home: Path
) -> None:
    monkeypatch.setenv("PATH", str(home))
    code, out, err = launch("codex")
    assert (code, out) == (1, "")
    assert "npm install -g @openai/codex" in err
    assert err.count("\n") == 1


def test_a_short_context_is_noted_and_an_unknown_model_refused(
    launch: Run, server: RecordingServer
) -> None:
    server.answer({"data": [{**CARD, "max_model_len": 4096}]})
    words = launch("claude", "--dry-run")[2]
    assert "note: org/model has a context of 4,096 tokens, and agents need 32,000 or more." in words
    assert "`mlxserve models`" in words
    code, _, err = launch("claude", "--model", "gpt-9")
    assert code == 1
    assert "org/model, default" in err


# ---- permanently


@pytest.mark.parametrize("agent", list(AGENTS))
@pytest.mark.parametrize("had", [None, '{"theme": "dark"}\n'])
def test_an_installation_can_be_undone(
    launch: Run, home: Path, agent: str, had: str | None
) -> None:
    file = AGENTS[agent].file()
    assert file.is_relative_to(home)
    if had is not None:
        file.parent.mkdir(parents=True)
        file.write_text(had)
    before = files_of(home)
    assert launch(agent, "--install")[0] == 0
    installed = file.read_text()
    assert "127.0.0.1" in installed
    assert launch(agent, "--install")[0] == 0  # again: the backup is still the original
    assert file.read_text() == installed
    code, out, _ = launch(agent, "--undo")
    assert code == 0
    assert str(file) in out
    after = files_of(home)
    assert after.pop(f"{file.relative_to(home)}.with-mlxserve") == installed
    assert after == before
    assert launch(agent, "--undo")[0] == 1


def test_a_file_with_a_key_is_readable_by_its_owner_only(
    launch: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLXSERVE_API_KEY", "secret-key")
    launch("claude", "--install")
    assert stat.S_IMODE(AGENTS["claude"].file().stat().st_mode) == 0o600


def test_a_dry_run_of_an_installation_is_a_diff(launch: Run, home: Path) -> None:
    _, out, _ = launch("opencode", "--install", "--dry-run")
    assert '+  "model": "mlxserve/org/model",' in out
    assert files_of(home) == {}


@pytest.mark.parametrize("text", ["// a comment\n{}", "[]"])
def test_an_unreadable_configuration_is_left_unchanged(launch: Run, home: Path, text: str) -> None:
    file = AGENTS["opencode"].file()
    file.parent.mkdir(parents=True)
    file.write_text(text)
    code, _, err = launch("opencode", "--install")
    assert code == 1
    assert "nothing was written" in err
    assert files_of(file.parent) == {"opencode.json": text}


def test_the_newest_server_of_the_list_is_found(
    run: Run, monkeypatch: pytest.MonkeyPatch, server: RecordingServer, home: Path
) -> None:
    monkeypatch.setenv("MLXSERVE_HOME", str(home))
    server.answer({"data": [CARD, {"id": "org/second", "max_model_len": 50_000}]})
    with registered(server.url, ["org/model"], needs_key=False):
        assert f"ANTHROPIC_BASE_URL={server.url}" in run("launch", "claude", "--dry-run").out
        monkeypatch.setenv("MLXSERVE_MODEL", "org/second")
        script = run("launch", "claude", "--dry-run").out
    assert "ANTHROPIC_MODEL=org/second" in script
    assert "CLAUDE_CODE_MAX_CONTEXT_TOKENS=50000" in script

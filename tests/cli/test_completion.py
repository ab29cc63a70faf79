"""`mlxserve completion`: the scripts, and what a shell gets that has read one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mlxserve.cli import running_servers
from mlxserve.cli.completion import (
    VARIABLE,
    downloaded_models,
    models_here,
    served_models,
    well_known_models,
)
from mlxserve.cli.running_servers import RunningServer
from tests.cli.commands import Run

COMMAND = Path(sys.executable).parent / "mlxserve"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_has_a_script(shell: str, run: Run) -> None:
    done = run("completion", shell)
    assert (done.code, done.err) == (0, "")
    assert f"_MLXSERVE_COMPLETE=complete_{shell}" in done.out


def test_another_shell_has_none(run: Run) -> None:
    outcome = run("completion", "tcsh")
    assert outcome.code == 2
    assert "Invalid value for 'shell': 'tcsh' is not one of 'bash', 'zsh', 'fish'" in outcome.err


@pytest.fixture
def completed(run: Run, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], set[str]]:
    """What bash would offer for the last word of a line."""

    def completed(line: str) -> set[str]:
        with monkeypatch.context() as patch:
            patch.setattr("__main__.__package__", None)  # as the console script has none
            patch.setenv(VARIABLE, "complete_bash")
            patch.setenv("COMP_WORDS", line)
            patch.setenv("COMP_CWORD", str(line.count(" ")))
            return set(run().out.split())

    return completed


def test_commands_and_flags_are_completed(completed: Callable[[str], set[str]]) -> None:
    assert completed("mlxserve ser") == {"serve", "service"}
    assert "--port" in completed("mlxserve serve --po")
    assert completed("mlxserve completion b") == {"bash"}


def test_models_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("mlx-community--Qwen3-4B-4bit", "org--plain", "org--$(reboot)"):
        (tmp_path / f"models--{name}" / "snapshots" / "1").mkdir(parents=True)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    for function in (models_here, downloaded_models):
        assert function("q") == ["qwen3:4b"]
        assert function("org/") == ["org/plain"], "a shell would run the other one"
    assert models_here("mlxserve-m") == ["mlxserve-mini"]
    assert downloaded_models("mlxserve-m") == [], "`rm` does not delete it"
    assert "qwen3:8b" in well_known_models("qwen3:")


def test_models_that_run_are_completed(monkeypatch: pytest.MonkeyPatch) -> None:
    running = RunningServer(1, "http://127.0.0.1:1", "org/one", 0.0, others=("two",))
    monkeypatch.setattr(running_servers, "running_servers", lambda: [running])
    assert served_models("") == ["org/one", "two"]


def test_a_models_name_is_completed_where_one_is_wanted(
    completed: Callable[[str], set[str]],
) -> None:
    for line in ["run", "serve --port 1 -m", "show", "cache clear -m", "doctor --model"]:
        assert completed(f"mlxserve {line} mlxserve-") == {"mlxserve-mini"}, line


def test_a_servers_model_is_completed_where_a_server_is_asked(
    completed: Callable[[str], set[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    running = RunningServer(1, "http://127.0.0.1:1", "org/one", 0.0)
    monkeypatch.setattr(running_servers, "running_servers", lambda: [running])
    for line in ["embed -m", "launch claude --model", "stop"]:
        assert completed(f"mlxserve {line} org/") == {"org/one"}, line


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed; not run")
def test_bash_reads_its_script(tmp_path: Path, run: Run) -> None:
    script = tmp_path / "script"
    script.write_text(run("completion", "bash").out)
    (tmp_path / "hub" / "models--mlx-community--Qwen3-4B-4bit" / "snapshots" / "1").mkdir(
        parents=True
    )
    # As bash calls it for `mlxserve show qwen3:<TAB>`: a colon ends a word, and what follows is replaced.
    asked = f"""
        source {script}
        complete -p mlxserve
        COMP_LINE='mlxserve show qwen3:' COMP_WORDS=(mlxserve show qwen3 :) COMP_CWORD=3
        COMP_POINT=${{#COMP_LINE}}
        _mlxserve_completion_with_colons {COMMAND}
        echo "${{COMPREPLY[@]}}"
    """
    env = {**os.environ, "HF_HUB_CACHE": str(tmp_path / "hub")}
    done = subprocess.run(
        ["bash", "-c", asked], capture_output=True, text=True, check=True, env=env
    )
    registered, offered = done.stdout.splitlines()
    assert "_mlxserve_completion_with_colons" in registered
    assert offered == "4b"


def test_bench_has_none_of_its_own(run: Run) -> None:
    assert "completion" not in run("bench", "--help").out

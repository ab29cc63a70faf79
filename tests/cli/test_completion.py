"""`mlxserve completion`: the scripts, and what a shell gets that has read one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.commands import mlxserve

COMMAND = Path(sys.executable).parent / "mlxserve"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_has_a_script(shell: str) -> None:
    done = mlxserve("completion", shell)
    assert (done.code, done.err) == (0, "")
    assert f"_MLXSERVE_COMPLETE=complete_{shell}" in done.out


def test_another_shell_has_none() -> None:
    assert mlxserve("completion", "tcsh").code == 2


def completed(line: str) -> set[str]:
    """What bash would offer for the last word of this line."""
    words = line.split(" ")
    done = subprocess.run(
        [COMMAND],
        env={
            **os.environ,
            "_MLXSERVE_COMPLETE": "complete_bash",
            "COMP_WORDS": line,
            "COMP_CWORD": str(len(words) - 1),
        },
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return set(done.stdout.split())


def test_commands_and_flags_are_completed() -> None:
    assert completed("mlxserve ser") == {"serve", "service"}
    assert "--port" in completed("mlxserve serve --po")
    assert completed("mlxserve completion b") == {"bash"}


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed; not run")
def test_bash_reads_its_script(tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text(mlxserve("completion", "bash").out)
    asked = f"source {script}; complete -p mlxserve"
    done = subprocess.run(["bash", "-c", asked], capture_output=True, text=True, check=True)
    assert "_mlxserve_completion" in done.stdout


def test_bench_has_none_of_its_own() -> None:
    assert "completion" not in mlxserve("bench", "--help").out

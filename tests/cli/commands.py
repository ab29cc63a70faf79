"""Runs a command in a process of its own, and checks what a failed one prints."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypeAlias

ROOT = Path(__file__).parents[2]


class CommandResult(NamedTuple):
    """How a command ended: exit code, stdout, stderr."""

    code: int
    out: str
    err: str


Run: TypeAlias = Callable[..., CommandResult]  # (*args, stdin="") -> CommandResult, in this process


def mlxserve(*args: str, stdin: str | None = None, **env: str) -> CommandResult:
    """Run the command in a process of its own."""
    return python("-m", "mlxserve", *args, stdin=stdin, **env)


def python(*args: str, stdin: str | None = None, **env: str) -> CommandResult:
    done = subprocess.run(
        [sys.executable, *args],
        cwd=ROOT,
        input=stdin,
        stdin=subprocess.DEVNULL if stdin is None else None,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **env},
        check=False,
    )
    return CommandResult(done.returncode, done.stdout, done.stderr)


def error_line(outcome: CommandResult) -> str:
    """The only line that a failed command prints."""
    assert (outcome.code, outcome.out) == (1, "")
    assert outcome.err.startswith("error: ")
    assert outcome.err.count("\n") == 1
    return outcome.err

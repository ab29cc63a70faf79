"""Runs checks in child processes, because mlx reads its variables once, when it starts.

    run_child("fences", {"MLX_MAX_OPS_PER_BUFFER": "0"})

runs `python -m mlxserve.doctor.child fences` and returns what that prints as JSON. A check that
takes its process down (out of memory, a crash in a driver) is an error here and no more.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

_SECONDS = 600.0
_MODULE = "mlxserve.doctor.child"


class ChildFailed(Exception):
    """The child did not answer; the message says why in one line."""


def run_child(
    task: str, environment: Mapping[str, str], *arguments: str, seconds: float = _SECONDS
) -> Any:
    """Return the task's answer. Raises ChildFailed."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", _MODULE, task, *arguments],
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired as late:
        raise ChildFailed(f"not finished after {seconds:.0f} s") from late
    except OSError as error:
        raise ChildFailed(f"not started: {error}") from error
    if done.returncode < 0:
        raise ChildFailed(f"ended by {signal.Signals(-done.returncode).name}")
    if done.returncode:
        raise ChildFailed(_last_line(done.stderr) or f"exit code {done.returncode}")
    try:
        return json.loads(_last_line(done.stdout))
    except ValueError as error:
        raise ChildFailed(f"printed {_last_line(done.stdout)!r} instead of an answer") from error


def _last_line(text: str) -> str:
    """Return the last line: a traceback's message, or a task's answer."""
    lines = (line.strip() for line in reversed(text.splitlines()))
    return next((line for line in lines if line), "")

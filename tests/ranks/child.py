"""Runs what ranks answer in processes of their own: mx.distributed knows one group in the life of a process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
_SECONDS = 540.0  # on a machine that is busy; pytest ends a test after 600


def print_found(found: Any) -> None:
    """Print what a child has found, as `run_child` reads it."""
    print(json.dumps({"found": found}))


def run_child(module: str, *arguments: Any, launcher: Sequence[str] = ()) -> Any:
    """Run `python -m module` with arguments in JSON, and return what it has found.

    It starts the other ranks itself, or `launcher` starts all.
    """
    command = [*launcher, sys.executable, "-m", module, *map(json.dumps, arguments)]
    done = subprocess.run(
        command,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=_SECONDS,
        env={**os.environ, "MKL_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3_000:]
    [line] = [line for line in done.stdout.splitlines() if line.startswith('{"found"')]
    return json.loads(line)["found"]

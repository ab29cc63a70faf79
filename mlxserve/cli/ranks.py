"""Commands that run as several ranks: replaced by mlx.launch, or started by it."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import NoReturn

from mlxserve.errors import InvalidConfig


def replace_by_launcher(hostfile: str, backend: str) -> NoReturn:
    """Run this command again, by mlx.launch, on every machine of `hostfile`. Raises InvalidConfig."""
    if not Path(hostfile).is_file():
        raise InvalidConfig(f"hostfile={hostfile} does not exist.", option="hostfile")
    program = shutil.which("mlx.launch") or str(Path(sys.executable).with_name("mlx.launch"))
    chosen = [] if backend == "any" else ["--backend", backend]
    command = [program, "--hostfile", hostfile, *chosen, "--"]
    try:
        os.execv(program, [*command, sys.executable, "-m", "mlxserve", *sys.argv[1:]])
    except OSError as error:
        raise InvalidConfig(f"{program} cannot be started: {error}.") from error

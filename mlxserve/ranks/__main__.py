"""`python -m mlxserve.ranks`: a rank that another one starts on its machine.

The options are JSON on stdin; the rank is in the environment.
"""

from __future__ import annotations

import json
import sys

from mlxserve.core.config import EngineConfig
from mlxserve.system import machine

if __name__ == "__main__":
    options = json.loads(sys.stdin.read())
    machine.import_mlx_lm()
    from mlxserve.ranks.run import run_worker  # imports mlx

    run_worker(EngineConfig().with_options(**options))

"""`python -m tests.perf NAME`: run one measurement."""

from __future__ import annotations

from mlxserve.system import machine
from tests.perf.cli import app

machine.prepare()  # before anything imports mlx
app(prog_name="python -m tests.perf")

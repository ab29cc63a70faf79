"""`python -m tests.perf NAME`: run one measurement."""

from __future__ import annotations

from tests.perf.cli import app

app(prog_name="python -m tests.perf")

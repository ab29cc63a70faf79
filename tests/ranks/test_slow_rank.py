"""Steps of ranks are bounded in time: macOS ends what waits for another rank as it ends what runs for long."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mlxserve.system.machine import free_ports
from tests.ranks.child import ROOT
from tests.ranks.slow_rank import NUM_ROWS, PAGE_SIZE, SECONDS
from tests.ranks.workload import launcher


@pytest.mark.ranks
@pytest.mark.parametrize("split", ["tensor", "pipeline"])
def test_steps_have_the_work_of_a_second_of_the_slowest_rank(
    split: str, model_folder: Callable[[str], Path]
) -> None:
    options = {f"{split}_parallel_size": 2, "master_port": free_ports(1)[0]}
    module = [sys.executable, "-m", "tests.ranks.slow_rank", str(model_folder("llama"))]
    done = subprocess.run(
        [*launcher(2), *module, json.dumps(options)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    assert lines, done.stderr[-3_000:]
    found = json.loads(lines[0])
    assert found["seconds"] >= SECONDS, "rank 0 measured its own part only"
    assert "steps" in found, "nothing bounds the steps of ranks"
    assert sum(rows for rows, *_ in found["steps"]) == 2 * NUM_ROWS
    for rows, work, allowed in found["steps"]:
        assert allowed <= 1 / SECONDS
        assert rows < NUM_ROWS
        assert work <= allowed or rows <= PAGE_SIZE, "a page is the least"

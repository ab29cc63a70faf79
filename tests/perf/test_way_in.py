"""The way of a chat request to the scheduler's queue stays short, and is counted alike each time."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache

import pytest

from tests.perf.calls import ROOT

_TRACE = """
import json
from tests.perf import calls, way_in
found = way_in.way_in_calls()
print(json.dumps([calls.functions(found), calls.by_file(found)]))
"""


@cache
def way_in() -> tuple[dict[str, int], dict[str, int]]:
    """(calls by function, calls by file), counted in a process of its own: the test's threads count as well."""
    run = subprocess.run(
        [sys.executable, "-c", _TRACE], cwd=ROOT, capture_output=True, text=True, check=True
    )
    by_function, by_file = json.loads(run.stdout.splitlines()[-1])
    return by_function, by_file


@pytest.mark.slow
def test_a_chat_request_is_queued_within_the_calls_that_the_design_allows() -> None:
    by_function, _ = way_in()
    assert sum(by_function.values()) <= 350, "\n".join(f"{n} {f}" for f, n in by_function.items())


@pytest.mark.slow
def test_the_way_begins_at_the_socket_and_ends_in_the_queue() -> None:
    by_function, by_file = way_in()
    assert by_function["mlxserve/api/server/connection.py Connection.data_received"] == 1
    assert by_function["mlxserve/scheduler/scheduler.py Scheduler.add"] == 1
    assert sum(by_file.values()) == sum(by_function.values())


def test_one_layer_is_before_the_routes_and_one_job_makes_the_prompt() -> None:
    by_function, _ = way_in()
    gate = [name for name in by_function if name.endswith(".__call__")]
    assert gate == ["mlxserve/api/access/gate.py Gate.__call__"]
    assert by_function["mlxserve/helpers/fair_executor.py FairExecutor._work"] == 1

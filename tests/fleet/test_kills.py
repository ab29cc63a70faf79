"""A few of the kills of `python -m tests.fleet.kills`, which the nightly workflow does by the hundred."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.fleet.kills import run_kills
from tests.fleet.redis_server import need_store
from tests.fleet.room import need_router

pytestmark = pytest.mark.fleet

NUM_KILLS = int(os.environ.get("FLEET_KILLS", "6"))


def test_conversations_go_on_while_servers_router_and_store_are_killed(tmp_path: Path) -> None:
    need_store()
    need_router()
    run = run_kills(NUM_KILLS, tmp_path, seed=3)
    assert run.wrong == []
    assert run.kills.total() >= NUM_KILLS
    assert run.num_answers > NUM_KILLS
    assert run.cached_tokens > 0

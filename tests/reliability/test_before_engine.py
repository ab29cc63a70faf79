"""One client's work before the engine does not stop another's: what that one asks for, beside each attack.

What is asserted is an order, not seconds: a busy machine is slow for both.
"""

from __future__ import annotations

from collections.abc import Iterator

import psutil
import pytest

from tests.api.server.process import Process, served
from tests.reliability.before_engine import (
    ask_beside,
    many_embeddings,
    schema_bombs,
    tiny_messages,
    unfinished_bodies,
)
from tests.waiting import wait_until

MIB = 1 << 20


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    with served(tmp_path_factory.mktemp("before-engine") / "stderr") as found:
        ask_beside(found)  # starts the helpers
        yield found


@pytest.mark.long
def test_others_pass_requests_of_many_tiny_messages(server: Process) -> None:
    with tiny_messages(server, 14, 6_000) as attack:
        wait_until(lambda: len(attack.statuses) >= 2)
        before = len(attack.statuses)
        ask_beside(server)
        assert len(attack.statuses) < before + 10
    assert len(attack.statuses) == 14
    assert set(attack.statuses) <= {400, 503}  # 503 where memory for bodies is small


@pytest.mark.long
def test_others_pass_schemas_that_cannot_be_compiled(server: Process) -> None:
    with schema_bombs(server, 8) as attack:
        wait_until(lambda: len(attack.statuses) >= 1)
        before = len(attack.statuses)
        ask_beside(server)
        assert len(attack.statuses) < before + 5
    assert attack.statuses == [400] * 8


@pytest.mark.long
def test_others_pass_requests_of_many_texts_to_embed(server: Process) -> None:
    with many_embeddings(server, 10, 60) as attack:
        for _ in range(2):
            ask_beside(server)
        assert len(attack.statuses) < 10, "they take turns, so all of them end late"
    assert attack.statuses == [200] * 10


@pytest.mark.slow
def test_unfinished_bodies_take_a_bounded_memory_and_others_pass_them(server: Process) -> None:
    process = psutil.Process(server.popen.pid)
    before = process.memory_info().rss
    with unfinished_bodies(server, 40, 31 * MIB) as attack:
        grown = process.memory_info().rss - before
        ask_beside(server)
    assert grown < 600 * MIB, f"{grown / MIB:.0f} MiB for {attack.num_sent} bodies"
    ask_beside(server)

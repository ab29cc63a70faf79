"""What rank 0 says of a step that does not end."""

from __future__ import annotations

import queue
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from mlxserve.model.rank_group import RankGroup
from mlxserve.ranks.lead import Lead
from mlxserve.ranks.wire import Channel


def _no_group() -> RankGroup:
    raise AssertionError("the ranks do not meet in this test")


@contextmanager
def lead_of_a_silent_rank(reasons: queue.SimpleQueue[str]) -> Iterator[Lead]:
    """Rank 1 has no watch, which would report its silence first."""
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as here,
        server.accept()[0],
    ):
        lead = Lead({1: Channel(here)}, timeout=0.2, join_group=_no_group)
        lead.attach(reasons.put, silence=lambda: 1.0)
        lead.watch()
        yield lead
        lead.close()


def test_a_step_that_waits_for_a_silent_rank_names_the_rank() -> None:
    reasons: queue.SimpleQueue[str] = queue.SimpleQueue()
    with lead_of_a_silent_rank(reasons):
        assert re.fullmatch(r"rank 1 has been silent for \d s", reasons.get(timeout=20))


def test_a_loss_that_is_noticed_after_a_step_failed_is_waited_for() -> None:
    reasons: queue.SimpleQueue[str] = queue.SimpleQueue()
    with lead_of_a_silent_rank(reasons) as lead:
        lead.wait_for_loss(20)
        assert "rank 1" in reasons.get_nowait(), "it returned before the reason was told"

"""What rank 0 says of a step that does not end."""

from __future__ import annotations

import queue
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import pytest

from mlxserve.model.rank_group import RankGroup
from mlxserve.ranks.lead import Lead
from mlxserve.ranks.wire import BEAT_BODY, Channel, FrameKind


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


class _Group:
    """Rank 1's answer to the secret that is said over the group comes at once."""

    def __init__(self, rank_1: Channel) -> None:
        self._rank_1 = rank_1

    def from_lead(self, said: list[int]) -> list[int]:
        self._rank_1.send(FrameKind.MEMBER, bytes(said))
        return said


@pytest.mark.parametrize("size", [0, 1, BEAT_BODY.size - 1, BEAT_BODY.size + 1])
def test_a_rank_that_sends_a_beat_of_another_length_is_lost(size: int) -> None:
    reasons: queue.SimpleQueue[str] = queue.SimpleQueue()
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as here,
        server.accept()[0] as there,
    ):
        rank_1 = Channel(there)
        lead = Lead(
            {1: Channel(here)}, timeout=60, join_group=lambda: cast(RankGroup, _Group(rank_1))
        )
        lead.attach(reasons.put, silence=lambda: 0.0)
        lead.join()
        rank_1.send(FrameKind.BEAT, bytes(size))
        assert "rank 1 is gone" in reasons.get(timeout=20)
        lead.close()


def test_a_loss_that_is_noticed_after_a_step_failed_is_waited_for() -> None:
    reasons: queue.SimpleQueue[str] = queue.SimpleQueue()
    with lead_of_a_silent_rank(reasons) as lead:
        lead.wait_for_loss(20)
        assert "rank 1" in reasons.get_nowait(), "it returned before the reason was told"

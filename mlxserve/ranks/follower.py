"""Follower: a worker's connection to rank 0. The process ends with it.

A thread of its own reads, because the worker may be waiting in a collective that never ends when
rank 0 goes away; so that thread ends the process.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import Callable, Iterator

import mlx.core as mx

from mlxserve.model.rank_group import RankGroup
from mlxserve.ranks.handshake import prove_member
from mlxserve.ranks.local import remove_hostfile
from mlxserve.ranks.wire import BEAT_BODY, Channel, FrameKind, RankFrame

BEAT_SECONDS = 1.0
WORKER_FAILED = 70  # exit codes of a worker
LEAD_LOST = 71
_CLOSE_SECONDS = 5.0  # time for a worker to end by itself


class Follower:
    """A worker's connection to rank 0."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._sending = threading.Lock()
        self._inbox: queue.SimpleQueue[RankFrame | Callable[[], None] | None] = queue.SimpleQueue()
        self._ended = threading.Event()
        # Number of the last frame that was acted on.
        self.reached = 0

    def join(self, group: RankGroup) -> None:
        """Prove to be a member of the group, and start the heartbeat.

        From now on the process ends with the connection, and reports to rank 0 each second.
        """
        prove_member(group, self._channel)
        for work in (self._read, self._beat):
            name = f"mlxserve-follower{work.__name__}"
            threading.Thread(target=work, name=name, daemon=True).start()

    def frames(self) -> Iterator[RankFrame]:
        """Yield frames until rank 0 closes the connection, and run calls between them."""
        while (item := self._inbox.get()) is not None:
            if isinstance(item, RankFrame):
                yield item
                self.reached = item.number
            else:
                item()
        self._ended.set()

    def call_soon(self, work: Callable[[], None]) -> None:
        """Call `work` between two frames, on the thread that takes them. For any thread."""
        self._inbox.put(work)

    def send(self, kind: FrameKind, body: bytes = b"") -> None:
        """Send a frame. Raises OSError."""
        with self._sending:
            self._channel.send(kind, body)

    def fail(self, reason: str) -> bool:
        """Report to rank 0 why this rank ends; True if it was sent."""
        with contextlib.suppress(OSError):
            self.send(FrameKind.ERROR, reason.encode())
            return True
        return False

    def _read(self) -> None:
        try:
            while (frame := self._channel.receive()).kind is not FrameKind.CLOSE:
                self._inbox.put(frame)
        except OSError:
            remove_hostfile()
            os._exit(LEAD_LOST)
        self._inbox.put(None)
        # It waits for a step that rank 0 has given up.
        if not self._ended.wait(_CLOSE_SECONDS):
            os._exit(0)

    def _beat(self) -> None:
        try:
            while not self._ended.wait(BEAT_SECONDS):
                memory = mx.get_active_memory(), mx.get_peak_memory()
                self.send(FrameKind.BEAT, BEAT_BODY.pack(self.reached, *memory))
        except OSError:
            # The other thread sees it, too.
            return

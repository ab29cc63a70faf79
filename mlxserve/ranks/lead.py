"""Lead: rank 0's connections to the workers: sends their work and detects their loss.

A worker is lost when its connection ends, when it sends ERROR, and when it has been silent for the
timeout. Nothing brings it back: `on_loss` is called once, from another thread than the engine's,
which may be waiting for that worker in a collective.
"""

from __future__ import annotations

import queue
import struct
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import mlx.core as mx

from mlxserve.core.errors import EngineStopped, OutOfMemory
from mlxserve.core.stats import RankStats
from mlxserve.model.rank_group import RankGroup
from mlxserve.ranks.handshake import prove_lead
from mlxserve.ranks.local import LocalRanks
from mlxserve.ranks.wire import (
    BEAT_BODY,
    POOLED_KINDS,
    Channel,
    FrameKind,
    PlanEncoder,
    as_int32,
    number_of,
)
from mlxserve.request import Chunk

_ERROR_SECONDS = 1.0  # time in which rank 0 detects an error of all ranks itself
_TICK = 0.5  # seconds between two checks of the engine


class Lead:
    """The `Workers` of rank 0. Its methods are called on the engine's thread."""

    def __init__(
        self,
        channels: Mapping[int, Channel],
        timeout: float,
        join_group: Callable[[], RankGroup],
        local: LocalRanks | None = None,
        *,
        starts_again: bool = False,
    ) -> None:
        """timeout: seconds that a worker may be silent, and that a step may take.

        join_group: joins the group of all ranks
        local: the workers, if rank 0 has started them
        starts_again: whether another process starts all ranks again after a loss
        """
        self.starts_again = starts_again
        self._channels = dict(channels)
        self._timeout = timeout
        self._join_group = join_group
        self._local = local
        self._on_loss: Callable[[str], None] = _not_attached
        self._silence: Callable[[], float] = lambda: 0.0
        self._group: RankGroup | None = None
        # Time of a rank's last frame.
        self._heard = dict.fromkeys(channels, time.monotonic())
        self._lost = threading.Lock()  # taken once
        self._closing = threading.Event()
        self._encoder = PlanEncoder()
        self._answers: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()
        self._receive: Callable[[int, bytes], None] = _no_disks
        self._num_texts = 0
        self._stats = RankStats()

    # ---- life

    def attach(self, on_loss: Callable[[str], None], silence: Callable[[], float]) -> None:
        """on_loss: called once, with the reason.

        silence: seconds since the engine last ended a step, or woke up without work
        """
        self._on_loss, self._silence = on_loss, silence

    def join(self) -> RankGroup:
        """Join the group as its rank 0, and start detecting lost workers.

        Raises EngineStopped.
        """
        self._group = group = self._join_group()
        prove_lead(group, self._channels, self._timeout)
        for rank, channel in self._channels.items():
            channel.set_timeout(self._timeout)
            name = f"mlxserve-rank-{rank}"
            threading.Thread(
                target=self._listen, args=(rank, channel), name=name, daemon=True
            ).start()
        return group

    def watch(self) -> None:
        """Start counting a step that takes longer than the timeout as a loss."""
        threading.Thread(target=self._watch, name="mlxserve-rank-watch", daemon=True).start()

    def close(self) -> None:
        """Let the workers end, and wait for those on this machine. Idempotent."""
        if not self._closing.is_set():
            self._closing.set()
            self._tell(FrameKind.CLOSE)
        if self._local is not None:
            self._local.end()

    def stats(self) -> RankStats:
        return self._stats.copy()

    # ---- frames to the workers

    def step(self, chunks: Sequence[Chunk], sources: Mapping[Chunk, int]) -> None:
        """`sources`: for each lazy chunk, the row of the previous step that samples its token."""
        self._tell(FrameKind.STEP, self._encoder.encode(chunks, sources))

    def share(self, ids: mx.array) -> mx.array:
        """Call `RankGroup.share`, before the forward of guesses and at the end of a step that samples."""
        assert self._group is not None, "the group has not met"
        return self._group.share(ids)

    def copy_pages(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        self._tell(FrameKind.COPY, as_int32([*sources, *targets]))

    def back(self, kind: str, num_pages: int, *, is_ahead: bool = False) -> None:
        self._tell(FrameKind.BACK, as_int32([POOLED_KINDS.index(kind), num_pages, is_ahead]))

    def refuse_too_many(self, num_pages: int) -> None:
        """Raises OutOfMemory if a worker lacks memory for that many pages."""
        self._tell(FrameKind.ASK_SIZE, as_int32([num_pages]))
        for _ in self._channels:
            try:
                rank, refusal = self._answers.get(timeout=self._timeout)
            except queue.Empty:
                raise EngineStopped("A rank does not say how many pages it can have.") from None
            if refusal:
                raise OutOfMemory(f"Rank {rank}: {refusal}")

    def resize(self, num_pages: int) -> None:
        self._tell(FrameKind.RESIZE, as_int32([num_pages]))

    def drop_states(self, snapshots: Sequence[int], requests: Iterable[int]) -> None:
        """`requests`: numbers of those that have ended."""
        self._tell(FrameKind.DROP, as_int32([len(snapshots), *snapshots, *requests]))

    @property
    def ranks(self) -> Collection[int]:
        return self._channels.keys()

    def tell_disks(self, body: bytes) -> None:
        self._tell(FrameKind.DISK, body)

    def listen_to_disks(self, receive: Callable[[int, bytes], None]) -> None:
        self._receive = receive

    def begin_text(self, adapter: int | None = None) -> int:
        """Number a text to embed, with an adapter of this number."""
        self._num_texts += 1
        self._tell(FrameKind.BEGIN_TEXT, as_int32([self._num_texts, number_of(adapter)]))
        return self._num_texts

    def embed(self, text: int, token_ids: Sequence[int]) -> None:
        """Compute the next tokens of a text; none ends it."""
        self._tell(FrameKind.EMBED, as_int32([text, *token_ids]))

    def _tell(self, kind: FrameKind, body: bytes = b"") -> None:
        for rank, channel in self._channels.items():
            try:
                channel.send(kind, body)
            except OSError as error:
                self._lose(f"rank {rank} cannot be reached ({error})")

    # ---- what workers say

    def _listen(self, rank: int, channel: Channel) -> None:
        try:
            while True:
                frame = channel.receive()
                self._heard[rank] = time.monotonic()
                if frame.kind is FrameKind.BEAT:
                    self._count(str(rank), *BEAT_BODY.unpack(frame.body))
                elif frame.kind is FrameKind.MAX_PAGES:
                    self._answers.put((rank, frame.body.decode()))
                elif frame.kind is FrameKind.DISK:
                    self._receive(rank, frame.body)
                elif frame.kind is FrameKind.ERROR:
                    self._closing.wait(_ERROR_SECONDS)
                    return self._lose(f"rank {rank}: {frame.body.decode(errors='replace')}")
        except TimeoutError:
            self._lose(f"rank {rank} has been silent for {self._timeout:g} s")
        except (OSError, ValueError, struct.error) as error:
            self._lose(f"rank {rank} is gone ({error})")

    def _count(self, rank: str, num_frames: int, active: int, peak: int) -> None:
        self._stats.num_frames[rank] = num_frames
        self._stats.memory_active[rank] = active
        self._stats.memory_peak[rank] = peak

    def _watch(self) -> None:
        while not self._closing.wait(_TICK):
            if self._silence() > self._timeout:
                self._lose(self._why_stuck())
                return

    def _why_stuck(self) -> str:
        """Explain a stuck step: a rank that stops also stops the step.

        Either may be noticed first.
        """
        rank, heard = min(self._heard.items(), key=lambda item: item[1])
        seconds = time.monotonic() - heard
        if seconds > self._timeout / 2:
            return f"rank {rank} has been silent for {seconds:.0f} s"
        return f"a step has not ended for {self._timeout:g} s"

    def wait_for_loss(self, seconds: float) -> None:
        """Return when a worker is reported lost, or after the timeout.

        A collective may fail before a loss is noticed.
        """
        self._closing.wait(seconds)

    def _lose(self, reason: str) -> None:
        if self._closing.is_set() or not self._lost.acquire(blocking=False):
            return
        self._on_loss(reason)
        self._closing.set()
        if self._local is not None:
            self._local.kill()
        for channel in self._channels.values():  # the others end at a closed channel
            channel.close()


def _not_attached(reason: str) -> None:
    raise EngineStopped(reason)


def _no_disks(rank: int, _body: bytes) -> None:
    raise ValueError(f"rank {rank} tells of a disk cache, and there is none")

"""Workers: the other ranks of an engine, as rank 0's engine and model see them.

A protocol, because `mlxserve/ranks/` builds engines and so lies above them: its `Lead` is handed down.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Protocol

import mlx.core as mx

from mlxserve.core.stats import RankStats
from mlxserve.model.rank_group import RankGroup
from mlxserve.request import Chunk


class Workers(Protocol):
    """Called on the engine's thread, each method before rank 0 does the same over its own part."""

    @property
    def starts_again(self) -> bool:
        """True if all ranks, this one included, are started again after a loss."""

    def join(self) -> RankGroup:
        """Return the group of all ranks, which they join now. Raises EngineStopped."""

    def attach(self, on_loss: Callable[[str], None], silence: Callable[[], float]) -> None:
        """on_loss: called once, with the reason, from another thread.

        silence: seconds since the engine last ended a step, or woke up without work
        """

    def watch(self) -> None:
        """Start counting a step that takes longer than the timeout as a loss."""

    def wait_for_loss(self, seconds: float) -> None:
        """Return when a worker is reported lost, or after `seconds`."""

    def close(self) -> None:
        """Let the workers end. Idempotent."""

    def stats(self) -> RankStats: ...

    def step(self, chunks: Sequence[Chunk], sources: Mapping[Chunk, int]) -> None:
        """`sources`: for each lazy chunk, the row of the previous step that samples its token."""

    def share(self, ids: mx.array) -> mx.array:
        """`RankGroup.share`: of guesses before a forward, and at the end of a step that samples."""

    def copy_pages(self, sources: Sequence[int], targets: Sequence[int]) -> None: ...

    def back(self, kind: str, num_pages: int, *, is_ahead: bool = False) -> None:
        """`is_ahead`: back one layer's arrays on each worker, as `ModelRunner.back_ahead` does."""

    def refuse_too_many(self, num_pages: int) -> None:
        """Raises OutOfMemory if a worker lacks memory for that many pages."""

    def resize(self, num_pages: int) -> None: ...

    def drop_states(self, snapshots: Sequence[int], requests: Iterable[int]) -> None: ...

    @property
    def ranks(self) -> Collection[int]:
        """Numbers of the other ranks."""

    def tell_disks(self, body: bytes) -> None:
        """Send every rank a message about its records on disk."""

    def listen_to_disks(self, receive: Callable[[int, bytes], None]) -> None:
        """Call `receive` with each message about records and its rank, from another thread."""

    def begin_text(self, adapter: int | None = None) -> int:
        """Number a text to embed, with an adapter of this number."""

    def embed(self, text: int, token_ids: Sequence[int]) -> None:
        """Compute the next tokens of a text; none ends it."""

"""Times chunks by the tile kernel and by MLX's attention over copies, on this machine.

Which is faster depends on the chip, MLX's version, the head dimension and the rows: a copy costs as much
for few rows as for many. `use_timed` then replaces the rule by which long chunks are chosen otherwise.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

import mlx.core as mx

from metal_kernels.few_rows_trial import REFUSALS
from metal_kernels.limits import MIN_ACCELERATED_ROWS, MIN_COPIED_ROWS
from metal_kernels.long_chunks import is_fused
from metal_kernels.metal import MetalBackend
from metal_kernels.speeds import TimedAttention, paged_seconds

log = logging.getLogger("metal_kernels")

# A chunk that step memory is planned with has at least the last of these.
ROWS = (MIN_ACCELERATED_ROWS, 128, MIN_COPIED_ROWS)
MAX_CONTEXT = 4096  # some 10 ms of 256 rows on an M1
_REPEATS = 2

Timer: TypeAlias = Callable[[MetalBackend, TimedAttention], float]


@dataclass(frozen=True, slots=True)
class ChunkTimes:
    """Milliseconds of a layer's chunks by their rows: (tiles, copies)."""

    by_rows: dict[int, tuple[float, float]]

    @property
    def first_copied(self) -> int | None:
        """The fewest rows from which on copies are faster; None if they never are."""
        first = None
        for rows, (tiles, copies) in sorted(self.by_rows.items(), reverse=True):
            if copies >= tiles:
                break
            first = rows
        return first

    def __str__(self) -> str:
        rows = ", ".join(map(str, self.by_rows))
        each = ", ".join(f"{tiles:.2f} and {copies:.2f}" for tiles, copies in self.by_rows.values())
        first = self.first_copied
        choice = "the tile kernel" if first is None else f"copies from {first} rows on"
        return f"{choice}: {rows} rows take {each} ms by tiles and copies"


def seconds_of(backend: MetalBackend, what: TimedAttention) -> float:
    """Seconds of one chunk, the best of a few after one that compiles."""
    return paged_seconds(backend, what, repeats=_REPEATS, queued=1)


def time_chunks(
    backend: MetalBackend, what: TimedAttention, timer: Timer = seconds_of
) -> ChunkTimes | None:
    """Time the chunks of a layer like `what`, whose context is at most that of `what` or 4096.

    None where MLX has no fused kernel, or no exact one, and where one of the two does not run.
    """
    if what.dtype == mx.float32 or not is_fused(what.head_dim, what.dtype):
        return None
    times = {}
    try:
        for rows in ROWS:
            chunk = replace(what, rows=rows, context=max(rows, min(what.context, MAX_CONTEXT)))
            tiles, copies = (
                1e3 * timer(backend, each)
                for each in (replace(chunk, by_tiles=True), replace(chunk, by_copies=True))
            )
            times[rows] = tiles, copies
    except REFUSALS as error:
        log.info("Chunks with head dimension %d are not timed: %s", what.head_dim, error)
        return None
    finally:
        mx.clear_cache()
    return ChunkTimes(times)

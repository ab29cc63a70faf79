"""Times chunks by the tile kernel and by MLX's two attentions over copies, on this machine.

Which is faster depends on the chip, MLX's version, the head dimension and the rows: a copy costs as much
for few rows as for many. `use_timed` then replaces the rule by which long chunks are chosen otherwise.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

import mlx.core as mx

from metal_kernels.few_rows_trial import REFUSALS
from metal_kernels.limits import MIN_ACCELERATED_ROWS, MIN_COPIED_ROWS
from metal_kernels.long_chunks import CopiedChunks, is_fused, is_unfused
from metal_kernels.metal import MetalBackend
from metal_kernels.speeds import TimedAttention, paged_seconds

log = logging.getLogger("metal_kernels")

# The first is the longest chunk that a copy of its pages costs as much as (by the model of costs tiles take 0.9 of
# the time at 32 rows on an M5, and 1.3 to 1.6 at 64). A chunk that step memory is planned with has at least the last.
ROWS = (32, MIN_ACCELERATED_ROWS, 128, MIN_COPIED_ROWS)
MAX_CONTEXT = 4096  # some 10 ms of 256 rows on an M1
_REPEATS = 2

Timer: TypeAlias = Callable[[MetalBackend, TimedAttention], float]


class WayTimes(NamedTuple):
    """Milliseconds of one chunk by each way; None for one that is not timed.

    tiles: by the tile kernel
    fused: over copies, by MLX's fused attention
    unfused: over copies, by its unfused one in blocks of rows
    cooperative: by the tile kernel of cooperative tensors
    """

    tiles: float
    fused: float | None = None
    unfused: float | None = None
    cooperative: float | None = None

    @property
    def without_copies(self) -> float:
        """Milliseconds by the faster kernel that reads the pages."""
        return self.tiles if self.cooperative is None else min(self.tiles, self.cooperative)


@dataclass(frozen=True, slots=True)
class ChunkTimes:
    """Milliseconds of a layer's chunks by their rows. Of all rows the same ways are timed."""

    by_rows: dict[int, WayTimes]

    def choice(self, num_heads: int) -> CopiedChunks | None:
        """Return how chunks attend that have the layer's query heads; None by a tile kernel.

        Of MLX's two attentions the one that is faster for the most rows takes all copies: the
        memory that is planned for these suffices for fewer rows.
        """
        is_unfused = self._is_unfused
        first = None
        for rows, times in sorted(self.by_rows.items(), reverse=True):
            copies = times.unfused if is_unfused else times.fused
            if copies is None or copies >= times.without_copies:
                break
            first = rows
        if first is None:
            return None
        return CopiedChunks(first, num_heads if is_unfused else None)

    @property
    def first_cooperative(self) -> int | None:
        """The fewest rows from which on cooperative tensors are the faster tiles; None if never."""
        first = None
        for rows, times in sorted(self.by_rows.items(), reverse=True):
            if times.cooperative is None or times.cooperative >= times.tiles:
                break
            first = rows
        return first

    @property
    def _is_unfused(self) -> bool:
        largest = self.by_rows[max(self.by_rows)]
        fused, unfused = largest.fused, largest.unfused
        return unfused is not None and (fused is None or unfused < fused)

    def __str__(self) -> str:
        first = next(iter(self.by_rows.values()))
        names = _listed(
            [_NAMES[way] for way in WayTimes._fields if getattr(first, way) is not None]
        )
        each = ", ".join(
            _listed([f"{time:.2f}" for time in times if time is not None])
            for times in self.by_rows.values()
        )
        choice = self.choice(1)
        if choice is None:
            chosen = "the tile kernel"
        else:
            chosen = f"copies from {choice.first_rows} rows on"
            chosen += ", unfused" if choice.unfused_heads is not None else ""
        if self.first_cooperative is not None:
            chosen += f", cooperative tensors from {self.first_cooperative} rows on without copies"
        rows = ", ".join(map(str, self.by_rows))
        return f"{chosen}: {rows} rows take {each} ms by {names}"


_NAMES = {
    "tiles": "tiles",
    "fused": "copies",
    "unfused": "copies unfused",
    "cooperative": "cooperative tensors",
}


def _listed(words: list[str]) -> str:
    """`a, b and c`."""
    *before, last = words
    return f"{', '.join(before)} and {last}" if before else last


def seconds_of(backend: MetalBackend, what: TimedAttention) -> float:
    """Seconds of one chunk, the best of a few after one that compiles."""
    return paged_seconds(backend, what, repeats=_REPEATS, queued=1)


def time_chunks(
    backend: MetalBackend,
    what: TimedAttention,
    timer: Timer = seconds_of,
    *,
    has_cooperative: bool = False,
) -> ChunkTimes | None:
    """Time the chunks of a layer like `what`, whose context is at most that of `what` or 4096.

    MLX's attention is timed fused where it has a fused kernel, and unfused where it computes so by
    itself. Cooperative tensors are timed if they passed their trial. None for float32, which it does not compute exactly, and where one way does not run.
    """
    if what.dtype == mx.float32:
        return None
    ways = {"tiles": replace(what, by_tiles=True)}
    if is_fused(what.head_dim, what.dtype):
        ways["fused"] = replace(what, by_copies=True)
    if is_unfused(what.head_dim, what.dtype):
        ways["unfused"] = replace(what, by_blocks=True)
    if has_cooperative:
        ways["cooperative"] = replace(what, is_cooperative=True)
    times = {}
    try:
        for rows in ROWS:
            context = max(rows, min(what.context, MAX_CONTEXT))
            milliseconds = {
                way: 1e3 * timer(backend, replace(chunk, rows=rows, context=context))
                for way, chunk in ways.items()
            }
            times[rows] = WayTimes(**milliseconds)
    except REFUSALS as error:
        log.info("Chunks with head dimension %d are not timed: %s", what.head_dim, error)
        return None
    finally:
        mx.clear_cache()
    return ChunkTimes(times)

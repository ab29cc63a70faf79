"""Long chunks: those that MLX's own attention takes, over copies of their pages.

Its fused attention, or its unfused one in blocks of rows (`unfused_attention.py`).
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from enum import Enum, auto
from itertools import groupby

import mlx.core as mx
import numpy as np

from metal_kernels import cooperative_tiles
from metal_kernels.limits import (
    COPY_BYTES,
    MIN_ACCELERATED_ROWS,
    MIN_COPIED_ROWS,
    SHARE_COPIED,
    positions_in,
    room_for,
)
from metal_kernels.plans import upload
from metal_kernels.step_ways import StepWay
from metal_kernels.tables import SequenceTables
from metal_kernels.unfused_attention import BLOCK_BYTES

log = logging.getLogger("metal_kernels")

# Head dimensions of MLX's fused kernels for more than eight rows on every chip (`has_fused_kernel` in its
# metal/scaled_dot_product_attention.cpp): the answer where no Mac can be asked, in the emulator.
_FUSED = (64, 72, 80, 96, 128, 192, 256)
# Of these, what MLX computes unfused unless it is forced (`use_fallback` there), because its fused kernel is
# slower: others measured prompts 13 % slower at 32 Ki positions and 22 % at 64 Ki (ml-explore/mlx#3658).
_SLOWER_FUSED = (192, 256)
# On neural accelerators MLX has another fused kernel for 256, and one for 512, which tells that they are there.
_FAST_ON_ACCELERATORS = 256
_ONLY_ON_ACCELERATORS = 512

# Head dimensions that MLX computes fused without being forced: those of the kernel that is not slower.
_FUSED_UNFORCED = tuple(dim for dim in _FUSED if dim not in _SLOWER_FUSED)


@dataclass(frozen=True, slots=True)
class CopiedChunks:
    """Says which long chunks attend over copies of their pages, and by which attention of MLX.

    first_rows: the fewest rows of such a chunk
    unfused_heads: the most query heads of a layer that is computed by MLX's unfused attention,
        whose scores are planned for; None if MLX's fused attention computes it
    """

    first_rows: int
    unfused_heads: int | None = None

    def score_bytes(self, rows: int, dtype: mx.Dtype) -> int:
        """Bytes of a position's scores of all rows, and of their mask; 0 if they are not kept."""
        if self.unfused_heads is None:
            return 0
        return rows * (self.unfused_heads * dtype.size + mx.bool_.size)


# By head dimension and dtype, what a trial on this machine found; see `use_timed`.
timed_choices: dict[tuple[int, mx.Dtype], CopiedChunks | None] = {}


def use_timed(head_dim: int, dtype: mx.Dtype, chosen: CopiedChunks | None) -> None:
    """Let long chunks attend so in this process from now on; None: by the tile kernel.

    The first call for a head dimension counts: another model's layers change no answer.
    """
    timed_choices.setdefault((head_dim, dtype), chosen)


def copying(head_dim: int, dtype: mx.Dtype) -> CopiedChunks | None:
    """Return how long chunks attend over copies; None if the tile kernel reads their pages.

    By `use_timed`, or else MLX's own routing: a copy pays from 256 rows on, and from 64 on where
    only MLX's attention computes on neural accelerators.
    """
    if (head_dim, dtype) in timed_choices:
        return timed_choices[head_dim, dtype]
    if dtype == mx.float32 or not is_fast(head_dim, dtype):
        return None
    return CopiedChunks(MIN_ACCELERATED_ROWS if has_accelerators(dtype) else MIN_COPIED_ROWS)


def can_copy(
    num_heads: int,
    head_dim: int,
    dtype: mx.Dtype,
    *,
    has_sinks: bool,
    without: Collection[StepWay] = (),
) -> bool:
    """True if long chunks of a layer attend over copies; otherwise the tile kernel reads its pages.

    num_heads: query heads. More than memory is planned for are not computed unfused, nor are
        sinks, which MLX appends to a copy of the scores
    without: ways that no step goes
    """
    how = copying(head_dim, dtype)
    if how is None or StepWay.GATHERED in without:
        return False
    if how.unfused_heads is None:
        return True
    return not has_sinks and num_heads <= how.unfused_heads and StepWay.BLOCKS not in without


def longest_copied(
    rows: int, kv_heads: int, head_dim: int, dtype: mx.Dtype, memory: int | None = None
) -> int:
    """The most positions that a chunk of `rows` may see for its pages to be copied; 0: none.

    memory: the machine's, in bytes; None for this one's

    The copies, and the scores of unfused attention, take their share of the memory at most.
    CopiedChunks a key costs about as much as one row's product with it, so many rows make the copy
    cheap. It depends on the chunk alone, so that an answer does not depend on its neighbours. The
    tile kernel keeps float32, which MLX's attention computes in TF32 on an M5.
    """
    how = copying(head_dim, dtype)
    if how is None or rows < how.first_rows:
        return 0
    most = (total_memory() if memory is None else memory) // SHARE_COPIED
    each = 2 * kv_heads * head_dim * dtype.size + how.score_bytes(rows, dtype)
    return positions_in(most // each)


def room_copied(
    rows: int, context: int, kv_heads: int, head_dim: int, dtype: mx.Dtype, window: int | None
) -> int:
    """Positions that copies have room for, of a chunk of `rows` whose last row sees `context`.

    0 if the tile kernel reads the pages instead.
    """
    positions = context - _first_position(rows, context, window)
    longest = longest_copied(rows, kv_heads, head_dim, dtype)
    return room_for(positions) if positions <= longest else 0


def counted_copies(
    rows: int, context: int, kv_heads: int, head_dim: int, dtype: mx.Dtype, window: int | None
) -> int:
    """Positions that the copies of a chunk count as; arguments of `room_copied`."""
    room = room_copied(rows, context, kv_heads, head_dim, dtype, window)
    return counted_positions(rows, room, head_dim, dtype)


def counted_positions(rows: int, positions: int, head_dim: int, dtype: mx.Dtype) -> int:
    """Positions whose copies alone take as much memory as those of `positions` with their scores.

    A step counts its copies so (`mlxserve/core/step_rows.py`); rows: of the chunk.
    """
    how = copying(head_dim, dtype)
    each = 0 if how is None else how.score_bytes(rows, dtype)
    return positions + -(-positions * each // COPY_BYTES)


def is_fast(head_dim: int, dtype: mx.Dtype) -> bool:
    """True if MLX's fused attention is expected to be faster than the tile kernel.

    That is, MLX takes it without being forced, or it computes on neural accelerators, which the
    tile kernel does not.
    """
    if not is_fused(head_dim, dtype):
        return False
    if head_dim not in _SLOWER_FUSED:
        return True
    return head_dim == _FAST_ON_ACCELERATORS and has_accelerators(dtype)


def has_accelerators(dtype: mx.Dtype) -> bool:
    """True if MLX computes attention of this dtype on neural accelerators here."""
    return is_fused(_ONLY_ON_ACCELERATORS, dtype)


def is_unfused(head_dim: int, dtype: mx.Dtype) -> bool:
    """True if MLX computes long chunks unfused unless it is forced, or has no fused kernel."""
    return head_dim not in _FUSED_UNFORCED or not is_fused(head_dim, dtype)


@functools.cache
def is_fused(head_dim: int, dtype: mx.Dtype) -> bool:
    """True if this MLX has a fused attention kernel for long chunks on this machine.

    MLX says so while it builds the graph. Any other would hold the scores of all rows in memory.
    """
    if not mx.metal.is_available():
        return head_dim in _FUSED
    rows, mask = (
        mx.zeros((1, 2, MIN_COPIED_ROWS, head_dim), dtype),
        mx.ones((MIN_COPIED_ROWS, MIN_COPIED_ROWS), mx.bool_),
    )
    try:
        for kind in ("causal", mask):
            fused_attention(rows, rows, rows, scale=1.0, mask=kind, sinks=None)
    except ValueError as error:
        log.info("long chunks with head dimension %d by the tile kernel: %s", head_dim, error)
        return False
    return True


def fused_attention(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    *,
    scale: float,
    mask: mx.array | str,
    sinks: mx.array | None,
) -> mx.array:
    """MLX's attention, (1, heads, rows, head_dim), by a fused kernel even if MLX prefers another.

    The other holds all scores. Raises ValueError if there is none. A CPU has none and computes as
    it does.
    """
    out: mx.array = mx.fast.scaled_dot_product_attention(
        queries,
        keys,
        values,
        scale=scale,
        mask=mask,
        sinks=sinks,
        force_fused=bool(mx.metal.is_available()),
    )
    return out


@functools.cache
def total_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@dataclass(frozen=True, slots=True)
class ChunkRun:
    """Consecutive chunks of a step that one kernel takes, or a single one over copies."""

    tables: SequenceTables
    first_row: int
    end_row: int
    gathered: Gathered | None  # over copies only
    is_cooperative: bool = False  # by the tile kernel of cooperative tensors


@dataclass(frozen=True, slots=True)
class Gathered:
    """The pages of a long chunk's keys, and the positions that it sees."""

    num_pages: int
    num_seen: int  # positions that any row sees, which are copied
    room: int  # positions that the copies have room for
    pages: mx.array  # (3 + num_pages) int32, as gather_pages.metal lists them
    mask: mx.array | str  # (rows, positions seen) bool, or "causal"
    block_bytes: int = 0  # of scores, in MLX's unfused attention; 0: by the fused one

    @classmethod
    def from_tables(
        cls, tables: SequenceTables, window: int | None, block_bytes: int = 0
    ) -> Gathered:
        """Plan the copy; tables: of one sequence."""
        rows, context, size = tables.num_rows, int(tables.context_lens[0]), tables.page_size
        first = _first_position(rows, context, window)
        first_page = first // size
        pages = tables.page_tables[0, first_page : -(-context // size)]
        num_seen = context - first
        room = room_for(num_seen)
        listed = upload(np.concatenate([[first - first_page * size, num_seen, room], pages]))
        if window is None or window >= context:
            return cls(len(pages), num_seen, room, listed, "causal", block_bytes)
        # By the device: half a million comparisons take a host a fifth of such a step's time.
        distance = mx.expand_dims(mx.arange(context - rows, context), 1) - mx.arange(first, context)
        mask = (distance >= 0) & (distance < window)
        return cls(len(pages), num_seen, room, listed, mask, block_bytes)


class _Way(Enum):
    """Names the ways in which a chunk may attend."""

    TILES = auto()
    COOPERATIVE = auto()
    COPIES = auto()


def runs_of(
    tables: SequenceTables,
    kv_heads: int,
    head_dim: int,
    dtype: mx.Dtype,
    window: int | None,
    *,
    may_copy: bool = True,
) -> tuple[ChunkRun, ...]:
    """Split chunks into runs, in order: each over copies alone, others in between by their kernel.

    Which way a chunk goes depends on it alone.
    """
    first = cooperative_tiles.first_rows(head_dim, dtype)
    if not may_copy and first is None:
        return (ChunkRun(tables, 0, tables.num_rows, None),)
    how = copying(head_dim, dtype)
    block_bytes = 0 if how is None or how.unfused_heads is None else BLOCK_BYTES

    def way_of(sequence: int) -> _Way:
        rows = int(tables.query_starts[sequence + 1] - tables.query_starts[sequence])
        # A mask of rows and positions would take memory for which no step is planned.
        if may_copy and (tables.ends is None or tables.ends_of(sequence) is None):
            context = int(tables.context_lens[sequence])
            if room_copied(rows, context, kv_heads, head_dim, dtype, window) > 0:
                return _Way.COPIES
        return _Way.COOPERATIVE if first is not None and rows >= first else _Way.TILES

    def runs() -> Iterator[ChunkRun]:
        for way, alike in groupby(range(len(tables)), way_of):
            sequences = list(alike)
            if way is _Way.COPIES:
                for sequence in sequences:
                    run = _run(tables, sequence, sequence + 1)
                    gathered = Gathered.from_tables(run.tables, window, block_bytes)
                    yield replace(run, gathered=gathered)
            else:
                run = _run(tables, sequences[0], sequences[-1] + 1)
                yield replace(run, is_cooperative=way is _Way.COOPERATIVE)

    return tuple(runs())


def _first_position(rows: int, context: int, window: int | None) -> int:
    """The first position that any row of a chunk sees."""
    return 0 if window is None else max(0, context - rows - window + 1)


def _run(tables: SequenceTables, first: int, end: int) -> ChunkRun:
    starts = tables.query_starts[first : end + 1]
    bounds = int(starts[0]), int(starts[-1])
    if (first, end) == (0, len(tables)):
        return ChunkRun(tables, *bounds, None)  # keeps its cached plans
    some = SequenceTables(
        tables.page_tables[first:end],
        tables.context_lens[first:end],
        starts - starts[0],
        tables.page_size,
        None if tables.ends is None else tables.ends[slice(*bounds)],
    )
    return ChunkRun(some, *bounds, None)

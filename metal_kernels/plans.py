"""Plans: the work of each threadgroup, computed on the host and uploaded once per step.

Lists of work instead of rectangular grids: sequences of very different lengths launch no idle
threadgroup. Positions are absolute, so the cuts of a sequence depend on that sequence alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from metal_kernels.kernels import SMALLEST_INPUT
from metal_kernels.tables import IntArray, SequenceTables

NO_WINDOW = 2**31 - 1
# Simdgroups side by side in a decode, or there would be more than 256 threads.
_MAX_PARTS = 4
_THREADGROUP_MEMORY = 32 << 10  # bytes


def upload(numbers: npt.ArrayLike, dtype: npt.DTypeLike = np.int32) -> mx.array:
    """Upload numbers, padded with rows of zeros to SMALLEST_INPUT elements."""
    array = np.ascontiguousarray(numbers, dtype)
    missing = -(-(SMALLEST_INPUT - array.size) // max(1, array[:1].size))
    if missing > 0:
        array = np.concatenate([array, np.zeros((missing, *array.shape[1:]), dtype)])
    return mx.array(array)


def rounded(count: int) -> int:
    """Round `count` up to 2, 3, 4, 6, 8, 12, 16, ...

    Dispatches have few sizes, so that the recorded graph of a step serves many steps. A threadgroup
    with nothing to do reads a row of queries, and stores a partial result that is never read.
    """
    power = 1 << max(1, (count - 1).bit_length())
    return power if power == 2 or count > power // 4 * 3 else power // 4 * 3


def page_tables(tables: SequenceTables) -> mx.array:
    """Return (sequences, rounded) int32."""
    sequences, columns = tables.page_tables.shape
    # np.pad takes ten times as long.
    padded = np.zeros((sequences, rounded(columns)), np.int32)
    padded[:, :columns] = tables.page_tables
    return upload(padded)


@dataclass(frozen=True, slots=True)
class WritePlan:
    """Rows that fill whole pages, and single rows: (count, 2) each, (row, page) and (row, slot)."""

    pages: IntArray
    tokens: IntArray
    pages_on_device: mx.array
    tokens_on_device: mx.array

    @classmethod
    def of_rows(cls, slots: IntArray) -> WritePlan:
        """Plan every row alone."""
        tokens = np.empty((len(slots), 2), np.int32)
        tokens[:, 0], tokens[:, 1] = np.arange(len(slots)), slots
        # The tokens stand for the pages as well, as no page is read.
        uploaded = upload(tokens)
        return cls(tokens[:0], tokens, uploaded, uploaded)

    @classmethod
    def of_pages(cls, slots: IntArray, page_size: int) -> WritePlan | None:
        """Plan whole pages; None if no rows fill one."""
        first_rows = _whole_pages(slots, page_size)
        if not len(first_rows):
            return None
        is_single = np.ones(len(slots), bool)
        is_single[(first_rows[:, None] + np.arange(page_size)).ravel()] = False
        rows = np.flatnonzero(is_single)
        pages = np.stack([first_rows, slots[first_rows] // page_size], axis=1).astype(np.int32)
        tokens = np.stack([rows, slots[rows]], axis=1).astype(np.int32)
        return cls(pages, tokens, upload(pages), upload(tokens))


def _whole_pages(slots: IntArray, page_size: int) -> npt.NDArray[np.int64]:
    """First rows of the runs of consecutive slots that fill a whole page."""
    if len(slots) < page_size:
        return np.zeros(0, np.int64)
    breaks = np.diff(slots, prepend=np.int32(0)) != 1  # between a row and the one before
    num_breaks = np.concatenate([[0], np.cumsum(breaks)])
    starts = np.flatnonzero(slots[: len(slots) - page_size + 1] % page_size == 0)
    # Slots are all different, so two such runs never overlap.
    is_whole: npt.NDArray[np.bool_] = num_breaks[starts + page_size] == num_breaks[starts + 1]
    return starts[is_whole]


def partition_size(kv_heads: int) -> int:
    """Keys of one threadgroup of paged_decode: a multiple of every page size.

    Small enough that one sequence's partitions, of each kv head, fill the cores of a large GPU: with 8
    kv heads 4,096 tokens are 128 threadgroups, with fewer heads as many from smaller partitions. Large
    enough that partials (D + 4 floats per head, written and read once) stay below the keys and values
    read: a quarter of them with 64 keys in float16 and 8 heads in a group. It depends on the model
    alone, so that an answer does not depend on its neighbours.
    """
    return 64 if kv_heads <= 2 else 128 if kv_heads <= 4 else 256


@dataclass(frozen=True, slots=True)
class Partitions:
    """Partitions of each sequence's context on the host, from the start of its window."""

    sequence: npt.NDArray[np.int64]
    begin: npt.NDArray[np.int64]  # first key
    end: npt.NDArray[np.int64]  # key after the last
    starts: npt.NDArray[np.int64]  # (sequences + 1,): the first partition of each sequence

    @classmethod
    def cut(cls, tables: SequenceTables, window: int | None, size: int) -> Partitions:
        """Cut each context into partitions of `size` keys."""
        lengths = tables.context_lens.astype(np.int64)
        first_keys = np.maximum(0, lengths - (window or NO_WINDOW))
        first = first_keys // size
        counts = (lengths - 1) // size - first + 1
        starts = np.concatenate([[0], np.cumsum(counts)])
        sequence = np.repeat(np.arange(len(tables)), counts)
        partition = first[sequence] + np.arange(len(sequence)) - starts[sequence]
        begin = np.maximum(partition * size, first_keys[sequence])
        end = np.minimum((partition + 1) * size, lengths[sequence])
        return cls(sequence, begin, end, starts)


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """Partitions of each sequence's context, from the start of its window."""

    num_partitions: int
    partitions: mx.array  # (rounded, 4): sequence, first key, key after the last, 0; then zeros
    starts: mx.array  # (sequences + 1,): the first partition of each sequence

    @classmethod
    def from_tables(cls, tables: SequenceTables, window: int | None, size: int) -> DecodePlan:
        """Plan the partitions of `size` keys, padded to a rounded number."""
        cut = Partitions.cut(tables, window, size)
        number = len(cut.sequence)
        columns = np.zeros((rounded(number), 4), np.int32)
        columns[:number, 0], columns[:number, 1], columns[:number, 2] = (
            cut.sequence,
            cut.begin,
            cut.end,
        )
        return cls(number, upload(columns), upload(cut.starts))

    @property
    def arrays(self) -> tuple[mx.array, mx.array]:
        return self.partitions, self.starts


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """Tiles of each chunk: `side` lines, a line being one query head of one row."""

    num_tiles: int
    tiles: mx.array  # (tiles, 8), as paged_prefill.metal lists them
    ends: mx.array | None  # (rows,), of `SequenceTables`

    @classmethod
    def of(cls, tables: SequenceTables, window: int | None, group: int, side: int) -> PrefillPlan:
        sequences, counts, num_tiles = [], [], 0
        starts = tables.query_starts.tolist()
        for sequence, context in enumerate(tables.context_lens.tolist()):
            start, end = starts[sequence], starts[sequence + 1]
            lines, position = (end - start) * group, context - (end - start)
            # Of a tile before all others, from which the first lines are counted.
            before = -num_tiles * side
            sequences.append((sequence, start, before, lines, position, 0, 0, window or NO_WINDOW))
            counts.append(-(-lines // side))
            num_tiles += counts[-1]
        tiles = np.array(sequences, np.int32).repeat(counts, axis=0)
        tiles[:, 2] += np.arange(0, num_tiles * side, side, dtype=np.int32)
        first_line, lines, position = tiles[:, 2], tiles[:, 3], tiles[:, 4]
        tiles[:, 6] = position - -np.minimum(first_line + side, lines) // group
        if window is not None:
            seen = np.maximum(0, position + first_line // group - window + 1)
            tiles[:, 5] = seen // tables.page_size * tables.page_size
        if tables.ends is None:
            return cls(num_tiles, upload(tiles), None)
        first_rows = tiles[:, 1] + first_line // group
        last_rows = tiles[:, 1] + (np.minimum(first_line + side, lines) - 1) // group
        for tile, first, last in zip(tiles, first_rows, last_rows, strict=True):
            tile[6] = tables.ends[first : last + 1].max()
        return cls(num_tiles, upload(tiles), upload(tables.ends))


def tile_side(head_dim: int, item_size: int) -> int:
    """Lines and keys of a tile of paged_prefill: the most that fit in threadgroup memory."""
    for side in (32, 16, 8):
        if tile_bytes(head_dim, item_size, side, 1) <= _THREADGROUP_MEMORY:
            return side
    raise ValueError(f"no tile of head dimension {head_dim} fits in threadgroup memory")


def num_tiles(head_dim: int, item_size: int, side: int) -> int:
    """Number of tiles: 2 if the values' fits beside the keys' in threadgroup memory, else 1."""
    return 2 if tile_bytes(head_dim, item_size, side, 2) <= _THREADGROUP_MEMORY else 1


def tile_bytes(head_dim: int, item_size: int, side: int, tiles: int) -> int:
    """Threadgroup memory of paged_prefill: tiles of keys and values, and scores of split dimensions."""
    split = dim_split(head_dim)
    scores = split * side * (side + 4) * 4 if split > 1 else 16  # Metal's smallest
    return tiles * side * (head_dim * item_size + 16) + scores


def dim_split(head_dim: int) -> int:
    """Simdgroups of paged_prefill and grouped_decode that share the dimensions of a line or of heads.

    One with 256 dimensions has 133 matrix registers and others live in a thread, by a count of
    those in the text; an M1 or M2 has 128, and the rest would be spilled to memory.
    """
    return 2 if head_dim > 192 else 1


@dataclass(frozen=True, slots=True)
class HeadSplit:
    """The distribution of a group's query heads in paged_decode."""

    heads: int  # heads of one simdgroup, kept in its registers
    parts: int  # simdgroups side by side
    blocks: int  # threadgroups side by side, for groups beyond 16 (8 with 512 dimensions)

    @property
    def threads(self) -> int:
        """Threads of a threadgroup, as paged_decode.metal counts: at most 256.

        By public estimates an M1 or M2 runs 384 threads of a kernel that takes all registers; mlx
        raises ValueError for more.
        """
        return 32 * self.parts * (2 if self.parts > 2 else 4)

    @classmethod
    def of(cls, group: int, head_dim: int) -> HeadSplit:
        width = 4 if head_dim % 128 == 0 else 2 if head_dim % 64 == 0 else 4
        per_lane = -(-head_dim // (32 * width)) * width
        # 32 registers for queries, and 32 for sums.
        most = max(1, 32 // per_lane)
        blocks = -(-group // min(16, _MAX_PARTS * most))
        per_block = -(-group // blocks)
        parts = -(-per_block // most)
        return cls(-(-per_block // parts), parts, blocks)


@dataclass(frozen=True, slots=True)
class GroupSplit:
    """The distribution of a group's query heads in grouped_decode: eight to a simdgroup."""

    parts: int  # simdgroups side by side
    blocks: int  # threadgroups side by side, for groups beyond 32 (16 with 512 dimensions)
    split: int  # simdgroups that share the dimensions of the same heads

    @property
    def threads(self) -> int:
        """Threads of a threadgroup, as grouped_decode.metal counts: at most 256."""
        side_by_side = self.parts * self.split
        return 32 * side_by_side * (2 if side_by_side > 2 else 4)

    @classmethod
    def of(cls, group: int, head_dim: int) -> GroupSplit:
        split = dim_split(head_dim)
        blocks = -(-group // (8 * _MAX_PARTS // split))
        per_block = -(-group // blocks)
        return cls(-(-per_block // 8), blocks, split)


def is_large_group(group: int, *, is_quantised: bool) -> bool:
    """True if a decode multiplies a group's heads by 8x8 matrices.

    Fewer heads would leave columns unused. One head after the other takes 30 instructions a key and
    head, so that arithmetic takes as long as memory with 8 heads, or with 4 where keys and values
    are half as many bytes. Matrices take 10 to 20.
    """
    return group >= (4 if is_quantised else 8)

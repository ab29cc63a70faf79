"""Units of the rows of drafts: which partitions of a decode are read together.

A step that verifies a draft has several rows of one sequence, at positions that follow one another.
Each sees the keys of the one before and one more, so all but their last partitions are the same keys
on the same pages. `draft_decode` reads them once, and `grouped_drafts` for large groups of query heads:

    row        partitions              units
    0        0     1     2           (0, 3, 6)  (1, 4, 7)  (2, 5, 8)
    1        3     4     5
    2        6     7     8
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from metal_kernels.plans import HeadSplit, Partitions, rounded, upload
from metal_kernels.tables import IntArray, SequenceTables

MAX_ROWS = 8  # of a unit
# Keys that a simdgroup reads at a time, in draft_decode and in grouped_drafts; rows of a unit begin in the same, or
# their turns would differ.
KEYS, GROUPED_KEYS = 4, 16
# Of all rows' sums in grouped_drafts, which take as many registers of a lane as a row of 256 in grouped_decode.
_GROUPED_DIMS = 256
_PARTS = 2  # simdgroups side by side, with which paged_decode has as many turns


@dataclass(frozen=True, slots=True)
class UnitSplit:
    """The distribution of all rows' query heads in draft_decode."""

    heads: int  # of one simdgroup, kept in its registers
    parts: int  # simdgroups side by side

    @property
    def threads(self) -> int:
        """Threads of a threadgroup, as draft_decode.metal counts."""
        return 32 * 4 * self.parts

    @classmethod
    def of(cls, group: int, head_dim: int, rows: int) -> UnitSplit:
        lines = group * rows
        parts = -(-lines // _heads_of_a_simdgroup(head_dim))
        return cls(-(-lines // parts), parts)


def rows_together(group: int, head_dim: int) -> int:
    """Rows that a unit has at most: as many as fit in registers; 1 where no two are read together.

    A row alone must have the turns that it has in a unit, or its sums would be added in another order.
    """
    alone = HeadSplit.of(group, head_dim)
    # With more dimensions than 256 fewer keys are read at a time.
    if alone.blocks > 1 or alone.parts > _PARTS or head_dim > 256:
        return 1
    return max(1, min(MAX_ROWS, _PARTS * _heads_of_a_simdgroup(head_dim) // group))


def rows_of_large_groups(head_dim: int) -> int:
    """Return what `rows_together` does for a large group of query heads."""
    return max(1, min(MAX_ROWS, _GROUPED_DIMS // head_dim))


def _heads_of_a_simdgroup(head_dim: int) -> int:
    return HeadSplit.of(1024, head_dim).heads


def draft_units(
    tables: SequenceTables, window: int | None, size: int, most: int, keys: int = KEYS
) -> IntArray:
    """Return (units, rows) numbers of partitions, as draft_decode.metal and grouped_drafts.metal have them.

    Every partition is in one unit. Has one column, and then no meaning, where no two are read together.
    most: rows of a unit
    keys: that are read at a time
    """
    follows = _follows(tables)
    if most < 2 or not follows.any():
        return np.zeros((1, 1), np.int32)
    if window is None:
        return _without_window(tables.context_lens, follows, size, most)
    cut = Partitions.cut(tables, window, size)
    starts, number = cut.starts.tolist(), cut.begin // size
    place = np.zeros(len(number), np.int64)  # in its unit
    before = np.full(len(number), -1)  # the partition of the row before, if it is in the unit
    for row in (np.flatnonzero(follows) + 1).tolist():
        begin, end = starts[row : row + 2]
        # The row before begins and ends no later.
        first = starts[row - 1] + int(number[begin] - number[starts[row - 1]])
        own = np.arange(begin, begin + min(end - begin, begin - first))
        other = own - begin + first
        joins = cut.begin[own] // keys == cut.begin[other] // keys
        joins &= place[other] + 1 < most
        place[own] = np.where(joins, place[other] + 1, 0)
        before[own] = np.where(joins, other, -1)
    is_last = np.ones(len(number), bool)
    is_last[before[before >= 0]] = False
    units = np.full((int(np.count_nonzero(is_last)), int(place.max()) + 1), -1, np.int32)
    column = np.flatnonzero(is_last)
    for at in range(units.shape[1] - 1, -1, -1):
        units[:, at] = column
        column = np.where(column < 0, -1, before[column])
    return units


def _without_window(
    lengths: IntArray, follows: npt.NDArray[np.bool_], size: int, most: int
) -> IntArray:
    """Return what `draft_units` does where rows have all partitions of the row before, in a third of the time."""
    counts = (-(-lengths // size)).tolist()
    runs = [[0]]
    for row, joins in enumerate(follows.tolist(), 1):
        if joins and len(runs[-1]) < most:
            runs[-1].append(row)
        else:
            runs.append([row])
    width = max(map(len, runs))
    units = np.full((sum(counts[run[-1]] for run in runs), width), -1, np.int32)
    numbers = np.arange(sum(counts), dtype=np.int32)
    first, unit = 0, 0
    for run in runs:
        for column, row in enumerate(run, width - len(run)):
            units[unit : unit + counts[row], column] = numbers[first : first + counts[row]]
            first += counts[row]
        unit += counts[run[-1]]
    return units


def _follows(tables: SequenceTables) -> npt.NDArray[np.bool_]:
    """Return, for each row but the first, whether it is the position after the row before, on its pages."""
    lengths, pages = tables.context_lens, tables.page_tables
    follows: npt.NDArray[np.bool_] = lengths[1:] == lengths[:-1] + 1
    if follows.any():
        first_slots = np.arange(0, pages.shape[1] * tables.page_size, tables.page_size)
        is_free = first_slots >= lengths[:-1, None]
        follows &= ((pages[1:] == pages[:-1]) | is_free).all(axis=1)
    return follows


def uploaded_units(
    tables: SequenceTables, window: int | None, size: int, most: int, keys: int
) -> mx.array:
    """The units on the device, padded to a rounded number; one column where there are none."""
    (units,) = tables.upload(
        ("units", window, size, most, keys),
        lambda tables: (_padded(draft_units(tables, window, size, most, keys)),),
    )
    return units


def _padded(units: IntArray) -> mx.array:
    count, rows = units.shape
    padded = np.full((max(8, rounded(count)), rows), -1, np.int32)
    padded[:count] = units
    return upload(padded)

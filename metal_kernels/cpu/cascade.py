"""Decodes with a shared prefix: its keys and values are read once for all of them.

    positions  | shared by the group | own of row 0 | own of row 1 | ...
    row 0      | seen .............. | seen ....... |              |
    row 1      | seen .............. |              | seen ....... |

The rows of a group attend over one packed context under a mask, which computes scores that are not
needed, but in few large products. Cascade attention (Ye et al. 2024) has a product for each row's
own part: those took 16 ms of a layer whose shared part took 6, because the smallest products cost a
CPU as much as large ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

import mlx.core as mx
import numpy as np

from metal_kernels.tables import SequenceTables

_MIN_SHARED = 128  # positions; below, there is nothing to gain
_MAX_SCORES = 3.0  # scores of the packed context per needed score


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Rows of a dispatch that attend together.

    rows      row numbers, in order
    runs      ranges of slots that hold the packed context
    unseen    (rows, positions): 0, or minus infinity for what belongs to another row
    """

    rows: list[int]
    runs: list[tuple[int, int]]
    unseen: mx.array


@dataclass(frozen=True, slots=True)
class Grouping:
    """The rows of a dispatch in groups, then the rest. `order` restores the dispatch's order."""

    groups: list[RowGroup]
    rest: SequenceTables | None
    rest_rows: list[int]
    order: list[int]


def group_rows(tables: SequenceTables) -> Grouping:
    """Group the rows that share enough for it to pay."""
    groups = [
        group for rows in _same_first_page(tables) if (group := _group(tables, rows)) is not None
    ]
    taken = {row for group in groups for row in group.rows}
    rest = [row for row in range(len(tables)) if row not in taken]
    new_order = [row for group in groups for row in group.rows] + rest
    return Grouping(groups, _only(tables, rest), rest, np.argsort(new_order).tolist())


def _same_first_page(tables: SequenceTables) -> Iterator[list[int]]:
    """Two or more rows each."""
    by_first: dict[int, list[int]] = {}
    for row, page in enumerate(tables.page_tables[:, 0].tolist()):
        by_first.setdefault(page, []).append(row)
    return (rows for rows in by_first.values() if len(rows) > 1)


def _group(tables: SequenceTables, rows: list[int]) -> RowGroup | None:
    """None where the rows share too little, or have too much of their own."""
    contexts = tables.context_lens[rows]
    num_shared = _num_shared(tables, rows)
    own = (contexts - num_shared).tolist()
    num_packed = num_shared + sum(own)
    num_needed = int(contexts.sum())
    if num_shared < _MIN_SHARED or len(rows) * num_packed > _MAX_SCORES * num_needed:
        return None
    runs = tables.runs(rows[0], 0, num_shared)
    unseen = np.full((len(rows), num_packed), np.float32(-np.inf))
    unseen[:, :num_shared] = 0
    for at, (row, end) in enumerate(zip(rows, accumulate(own, initial=num_shared), strict=False)):
        unseen[at, end : end + own[at]] = 0
        runs += tables.runs(row, num_shared)
    return RowGroup(rows, runs, mx.array(unseen))


def _num_shared(tables: SequenceTables, rows: list[int]) -> int:
    """Length of the prefix that all rows have on the same pages, in positions."""
    most = (int(tables.context_lens[rows].min()) - 1) // tables.page_size
    pages = tables.page_tables[rows, :most]
    differs = (pages != pages[0]).any(axis=0)
    return (int(differs.argmax()) if differs.any() else most) * tables.page_size


def _only(tables: SequenceTables, rows: list[int]) -> SequenceTables | None:
    if not rows:
        return None
    return SequenceTables(
        page_tables=tables.page_tables[rows],
        context_lens=tables.context_lens[rows],
        query_starts=np.arange(len(rows) + 1, dtype=np.int32),
        page_size=tables.page_size,
    )

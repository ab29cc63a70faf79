"""Decodes whose contexts begin with the same pages: what they share is read once, for all of them.

    positions  | shared by the group | own of row 0 | own of row 1 | ...
    row 0      | seen .............. | seen ....... |              |
    row 1      | seen .............. |              | seen ....... |

The rows of a group attend like the rows of one sequence whose context is the packed one, under a
mask. That computes scores nobody asked for, and in few large products: a product for each row's
own part (as cascade attention has it, Ye et al. 2024) took 16 ms of a layer where the shared part
took 6, because the smallest products cost a CPU as much as large ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

import mlx.core as mx
import numpy as np

from metal_kernels.tables import SequenceTables

_FEWEST_SHARED = 128  # positions below which there is nothing to gain
_MOST_SCORES = 3.0  # of the packed context, times those that are asked for


@dataclass(frozen=True, slots=True)
class Group:
    """Rows of a dispatch that attend together.

    rows      which, in order
    runs      ranges of slots that hold the packed context
    unseen    (rows, positions): 0, or minus infinity for what belongs to another row
    """

    rows: list[int]
    runs: list[tuple[int, int]]
    unseen: mx.array


@dataclass(frozen=True, slots=True)
class Split:
    """A dispatch of decodes in groups and a rest. `order` undoes the rows' new order."""

    groups: list[Group]
    rest: SequenceTables | None
    rest_rows: list[int]
    order: list[int]


def split(tables: SequenceTables) -> Split:
    """The groups of rows that share enough for it to pay."""
    groups = [group for rows in _alike(tables) if (group := _group(tables, rows)) is not None]
    taken = {row for group in groups for row in group.rows}
    rest = [row for row in range(len(tables)) if row not in taken]
    new_order = [row for group in groups for row in group.rows] + rest
    return Split(groups, _only(tables, rest), rest, np.argsort(new_order).tolist())


def _alike(tables: SequenceTables) -> Iterator[list[int]]:
    """Rows whose contexts begin with the same page."""
    by_first: dict[int, list[int]] = {}
    for row, page in enumerate(tables.page_tables[:, 0].tolist()):
        by_first.setdefault(page, []).append(row)
    return (rows for rows in by_first.values() if len(rows) > 1)


def _group(tables: SequenceTables, rows: list[int]) -> Group | None:
    """None where they share too little, or have too much of their own."""
    contexts = tables.context_lens[rows]
    num_shared = _num_shared(tables, rows)
    own = (contexts - num_shared).tolist()
    num_packed = num_shared + sum(own)
    num_wanted = int(contexts.sum())
    if num_shared < _FEWEST_SHARED or len(rows) * num_packed > _MOST_SCORES * num_wanted:
        return None
    runs = tables.runs(rows[0], 0, num_shared)
    unseen = np.full((len(rows), num_packed), np.float32(-np.inf))
    unseen[:, :num_shared] = 0
    for at, (row, end) in enumerate(zip(rows, accumulate(own, initial=num_shared), strict=False)):
        unseen[at, end : end + own[at]] = 0
        runs += tables.runs(row, num_shared)
    return Group(rows, runs, mx.array(unseen))


def _num_shared(tables: SequenceTables, rows: list[int]) -> int:
    """Positions at the beginning, in whole pages, that all of them have on the same pages."""
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

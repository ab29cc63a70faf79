"""SequenceTables: the pages of the sequences of one dispatch, built once per step on the host.

They keep the plans that a backend makes of them, as `Plans` do for the slots of a step's rows.
In numpy: the cpu backend computes with the numbers (it reads runs of consecutive pages as views),
and a Metal dispatch uploads them once for all layers. RecordedTables stands for the tables of any step
while the graph of a step is recorded (`MetalBackend.recording`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from operator import lt
from typing import Any, TypeAlias, TypeVar

import mlx.core as mx
import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]
Plan = TypeVar("Plan")
Arrays: TypeAlias = tuple[mx.array, ...]
MakeArrays: TypeAlias = "Callable[[SequenceTables], Arrays]"

_MOST = 2**31 - 1


class Plans:
    """Values that a backend computes from a step's numbers, cached for the step's other layers."""

    def plan(self, key: Hashable, make: Callable[[], Plan]) -> Plan:
        plan: Plan | None = self.kept.get(key)
        if plan is None:
            plan = self.kept[key] = make()
        return plan

    @cached_property
    def kept(self) -> dict[Hashable, Any]:
        return {}


@dataclass(frozen=True)
class SequenceTables(Plans):
    """Page tables and lengths of the sequences of one dispatch.

    Raises ValueError when they do not fit together.

    page_tables    (sequences, max_pages) int32; entries past a sequence's last page are padding
    context_lens   (sequences,) int32: tokens attended over, this step's own included
    query_starts   (sequences + 1,) int32: sequence s owns query rows query_starts[s] up to
                   query_starts[s + 1], which are the *last* rows of its context
    page_size      token slots of a page
    ends           (rows,) int32: for each query row, the position after the last one that it sees; None: a row
                   sees nothing after its own position. Rows of an image may see the whole image
    """

    page_tables: IntArray
    context_lens: IntArray
    query_starts: IntArray
    page_size: int
    ends: IntArray | None = None

    def __post_init__(self) -> None:
        sequences, max_pages = self.page_tables.shape
        if self.context_lens.shape != (sequences,) or self.query_starts.shape != (sequences + 1,):
            raise ValueError(
                f"{sequences} page tables, context_lens {self.context_lens.shape} and query_starts "
                f"{self.query_starts.shape} do not belong together"
            )
        # In lists: numpy's calls take as long as a hundred numbers.
        lengths, starts = self.context_lens.tolist(), self.query_starts.tolist()
        rows = [end - start for start, end in pairwise(starts)]
        if not sequences or starts[0] or min(rows) < 1:
            raise ValueError("query_starts must begin at 0 and give every sequence a row")
        if any(map(lt, lengths, rows)):
            raise ValueError("a context must hold its sequence's own rows")
        if max(lengths) > max_pages * self.page_size:
            raise ValueError(
                f"a context of {max(lengths)} tokens does not fit in "
                f"{max_pages} pages of {self.page_size}"
            )
        if self.highest_page > _MOST:
            raise ValueError("pages are numbered from 0")
        if self.ends is not None:
            self._check_ends(self.ends)

    def _check_ends(self, ends: IntArray) -> None:
        if ends.shape != (self.num_rows,):
            raise ValueError(f"{self.num_rows} rows have ends, got {ends.shape}")
        counts = np.diff(self.query_starts)
        contexts = np.repeat(self.context_lens, counts)
        positions = contexts + np.arange(self.num_rows) - np.repeat(self.query_starts[1:], counts)
        if np.any(ends <= positions) or np.any(ends > contexts):
            raise ValueError("a row must see its own position, and nothing after its context")

    def __len__(self) -> int:
        return len(self.context_lens)

    def upload(self, key: Hashable, make: MakeArrays) -> Arrays:
        """Return arrays that kernels read, made from these tables once for all layers."""
        if key not in self.uploads:
            self.uploads[key] = make, make(self)
        return self.uploads[key][1]

    @cached_property
    def uploads(self) -> dict[Hashable, tuple[MakeArrays, Arrays]]:
        """The uploaded arrays, each with the function that makes it from other tables."""
        return {}

    @cached_property
    def num_rows(self) -> int:
        return int(self.query_starts[-1])

    def ends_of(self, sequence: int) -> IntArray | None:
        """The ends of a sequence's rows; None if no row sees anything after its own position."""
        if self.ends is None:
            return None
        first, last = self.query_starts[sequence : sequence + 2].tolist()
        context = int(self.context_lens[sequence])
        ends = self.ends[first:last]
        own = np.arange(context - len(ends) + 1, context + 1)
        return None if np.array_equal(ends, own) else ends

    @cached_property
    def highest_page(self) -> int:
        """The highest page in use, a negative one above all others; padding does not count."""
        pages, size = self.page_tables.view(np.uint32), self.page_size
        # A chunk: two of numpy's calls instead of four.
        if len(self) == 1:
            return int(pages[0, : -(-int(self.context_lens[0]) // size)].max(initial=0))
        is_used = np.arange(0, pages.shape[1] * size, size) < self.context_lens[:, None]
        return int(np.maximum.reduce(pages, axis=None, initial=0, where=is_used))

    @cached_property
    def num_breaks(self) -> int:
        """Number of pages in use that do not follow their predecessor."""
        size = self.page_size
        first_slots = np.arange(size, self.page_tables.shape[1] * size, size)
        is_used = first_slots < self.context_lens[:, None]
        return int(np.count_nonzero(is_used & (np.diff(self.page_tables) != 1)))

    def slots(self, sequence: int, positions: npt.NDArray[np.integer]) -> IntArray:
        """Slots of these positions of a sequence."""
        pages: IntArray = self.page_tables[sequence, positions // self.page_size]
        return (pages * self.page_size + positions % self.page_size).astype(np.int32)

    def runs(self, sequence: int, first: int, last: int | None = None) -> list[tuple[int, int]]:
        """Ranges of slots with the positions from `first` up to `last`, in order.

        `last` None is the end of the context. Consecutive pages are one range: most sequences have
        a single one, because the pool hands out runs, and it can be read without a copy.
        """
        last = int(self.context_lens[sequence]) if last is None else last
        size = self.page_size
        first_page = first // size
        pages = self.page_tables[sequence, first_page : -(-last // size)]
        breaks = np.flatnonzero(np.diff(pages) != 1) + 1
        bounds = [0, *breaks.tolist(), len(pages)]
        ranges = []
        for begin, end in pairwise(bounds):
            start = int(pages[begin]) * size
            ranges.append((start, start + (end - begin) * size))
        ranges[0] = (ranges[0][0] + first - first_page * size, ranges[0][1])
        ranges[-1] = (ranges[-1][0], ranges[-1][1] - (-last % size))
        return ranges

    def queries(self) -> Iterator[tuple[int, int, int]]:
        """Yield (sequence, first row, row after the last) of each sequence."""
        starts = self.query_starts.tolist()
        for sequence in range(len(self)):
            yield sequence, starts[sequence], starts[sequence + 1]


class RecordedTables(SequenceTables):
    """Stands for the tables of any step of `num_rows` decodes that has uploads of these shapes.

    It has no numbers: a plan that reads them fails, instead of becoming a constant of the graph.
    """

    def __init__(self, num_rows: int, page_size: int, uploads: Mapping[Hashable, Arrays]) -> None:
        vars(self).update(
            page_size=page_size,
            num_rows=num_rows,
            highest_page=0,  # each step's own is checked before the graph is used
            uploads={key: (_no_numbers, arrays) for key, arrays in uploads.items()},
        )

    def __len__(self) -> int:
        return self.num_rows


def _no_numbers(_tables: SequenceTables) -> Arrays:
    raise AssertionError("recorded tables have their uploads from the start")

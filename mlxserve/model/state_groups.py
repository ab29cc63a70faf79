"""Group: consecutive tokens of sequences that a recurrent layer computes in one call.

    rows of a step   | decodes | drafts         | chunk of D         | chunk of E ...
                     | a0      | b0 b1 b2 c0 c1 | d0 .............dn |
    groups           (a0 c0 b0)  (c1 b1)  (b2)    (d0 .. di) (.. dn)    one call for each

The rows of a draft are groups of one token: which of them is the last accepted one is known only after the
step, so the state after each is kept. A step with drafts of up to k tokens makes k + 1 calls, however
many sequences have one. Where `replay_choice.py` finds a model that can, they are one group instead, and one call:

    groups           (a0 b0 b1 b2 c0 c1)            (d0 .. di) (.. dn)    `draft_rows.py`
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from metal_kernels.replay import ReplayOps
from mlxserve.model.draft_rows import DraftRows
from mlxserve.model.packed_states import Stack
from mlxserve.request import Chunk

# What a layer begins with: None is the beginning of a sequence, which to some layers is not the same
# as zeros (the first token of RecurrentGemma's is scaled differently).
Arrays = Sequence[mx.array | None]


@dataclass(slots=True)
class Group:
    """Rows of a step that recurrent layers see as (batch, length).

    The decodes of a step are one group; a chunk is one, or several if its state is kept within it.
    Drafts are as many as the longest one has rows.
    """

    first: int  # row of the step; the others follow, unless there are `rows`
    batch: int
    length: int
    chunks: tuple[Chunk, ...]  # one for each row of the batch
    start: int  # position of the first row, in a batch of one
    before: Stack | None  # None: the beginning of a sequence, or what `previous` leaves
    previous: Group | None = (
        None  # the group before, of as many sequences or of others before these
    )
    keeps: tuple[tuple[int, int], ...] = ()  # (row of the batch, id of the snapshot)
    level: int = 0  # tokens of the drafts before its row
    rows: Sequence[int] | None = None  # of the step, if they are not consecutive
    index: mx.array | None = None  # the same
    # If its rows are all those of drafts; `before` has a row for each sequence then.
    drafts: DraftRows | None = None
    # States after each layer.
    after: list[list[mx.array | None] | None] = field(default_factory=list)

    @classmethod
    def of_decodes(cls, num_rows: int, before: Stack) -> Group:
        """Build the group of a step of decodes, one row per request."""
        return cls(0, num_rows, 1, (), 0, before, after=[None] * len(before))

    @property
    def end(self) -> int:
        """The row after its last one."""
        return self.first + self.batch * self.length

    def begin(self, layer: int, num_arrays: int) -> Arrays:
        """Return a layer's initial arrays: the state before, or what an earlier group left."""
        if (left := self.after[layer]) is not None:
            return left
        if self.before is not None:
            return self.before[layer]
        if self.previous is None:
            return [None] * num_arrays
        arrays = self.previous.after[layer]
        assert arrays is not None, "groups run in order"
        if self.batch == self.previous.batch:
            return arrays
        return [None if array is None else array[-self.batch :] for array in arrays]

    def continues(self, row: int) -> bool:
        """True if a row of the batch follows another one of the same draft."""
        return self.level > 0 or (self.drafts is not None and row not in self.drafts.firsts)

    @property
    def is_within_chunk(self) -> bool:
        """True if its chunk continues after it."""
        return self.batch == 1 and self.start + self.length < self.chunks[0].end

    @property
    def positions(self) -> list[int]:
        """Position of the first token of each row of the batch."""
        return [self.start] if self.batch == 1 else [chunk.start for chunk in self.chunks]


def groups_of_drafts(
    decodes: Sequence[tuple[Chunk, int]], before: Stack | None, num_layers: int
) -> list[Group]:
    """Group the j-th rows of decodes with drafts and without, for each j.

    decodes: chunks and their first rows, in ascending order of the lengths of their drafts, so that a
        group continues the last sequences of the group before
    before: states of these sequences
    """
    groups: list[Group] = []
    for level in range(1 + len(decodes[-1][0].draft)):
        longer = [(chunk, row + level) for chunk, row in decodes if len(chunk.draft) >= level]
        parts = tuple(
            chunk._replace(start=chunk.start + level, length=1, draft=()) for chunk, _ in longer
        )
        rows = [row for _, row in longer]
        group = Group(
            rows[0],
            len(rows),
            1,
            parts,
            parts[0].start,
            None if groups else before,
            groups[-1] if groups else None,
            _kept_at_ends(parts),
            level,
            after=[None] * num_layers,
        )
        if rows != list(range(group.first, group.end)):
            group.rows, group.index = rows, mx.array(rows)
        groups.append(group)
    return groups


def group_of_drafts(
    decodes: Sequence[tuple[Chunk, int]], before: Stack | None, num_layers: int, ops: ReplayOps
) -> Group:
    """Group all rows of decodes with drafts and without.

    decodes: chunks and their first rows, in the order of the step
    before: states of these sequences
    """
    parts = tuple(
        chunk._replace(start=position, length=1, draft=())
        for chunk, _ in decodes
        for position in range(chunk.start, chunk.end)
    )
    rows = [row for chunk, first in decodes for row in range(first, first + chunk.length)]
    group = Group(
        rows[0],
        len(rows),
        1,
        parts,
        parts[0].start,
        before,
        keeps=_kept_at_ends(parts),
        drafts=DraftRows(ops, [chunk.length for chunk, _ in decodes]),
        after=[None] * num_layers,
    )
    if rows != list(range(group.first, group.end)):
        group.rows, group.index = rows, mx.array(rows)
    return group


def _kept_at_ends(parts: Sequence[Chunk]) -> tuple[tuple[int, int], ...]:
    return tuple(
        (row, id_)
        for row, part in enumerate(parts)
        for position, id_ in kept_states(part)
        if position == part.end
    )


def order_of_rows(groups: Sequence[Group]) -> mx.array | None:
    """Return for each row of the step its index among the groups' rows; None if all are in order."""
    rows: list[int] = []
    for group in groups:
        rows += range(group.first, group.end) if group.rows is None else group.rows
    if rows == sorted(rows):
        return None
    order = [0] * len(rows)
    for index, row in enumerate(rows):
        order[row] = index
    return mx.array(order)


def kept_states(chunk: Chunk) -> Sequence[tuple[int, int]]:
    """Return (position, id) of the snapshots that a chunk takes."""
    return chunk.state.keeps if chunk.state is not None else ()

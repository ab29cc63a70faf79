"""StateStore: the recurrent states of running sequences, and snapshots of them by id.

A recurrent layer keeps a few arrays of fixed size for a sequence instead of keys and values. They
are never written in place: the layer returns new ones, so that a step can be launched while the one
before is still being computed. Decodes are rows of one stack: as long as the same sequences decode in
the same order, the next step takes the stack as it is.

    held        of each running request: a row of a stack, and the position it has reached; after a
                step with a draft one for each of its rows, of which the next step continues one
    snapshots   by id, one packed row each; which ones exist is up to the scheduler
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby

import mlx.core as mx

from metal_kernels.reading import evaluate
from metal_kernels.replay import ReplayOps
from mlxserve.model.draft_rows import DraftRows
from mlxserve.model.packed_states import Packing, Stack, StateSpec
from mlxserve.model.state_groups import (
    Arrays,
    Group,
    group_of_drafts,
    groups_of_drafts,
    kept_states,
)
from mlxserve.request import Chunk, LiveRequest, RequestState


@dataclass(slots=True)
class _Held:
    """A sequence's state: a row of a stack, or of the drafts that it is computed from."""

    stack: Stack | DraftRows
    batch: int  # rows of the stack
    row: int
    position: int  # tokens that it has seen


class StateStore:
    """The recurrent states of one model. Lives on the engine's thread."""

    def __init__(
        self,
        specs: Sequence[StateSpec],
        *,
        is_used: bool | None = None,
        replay: ReplayOps | None = None,
    ) -> None:
        """is_used: whether the model has recurrent states; some of its ranks may have none.

        replay: computes all rows of drafts together; None for a call for each row of a draft
        """
        self.specs = tuple(specs)
        self.is_used = bool(specs) if is_used is None else is_used
        self._replay = replay
        # Of each request: its state, followed by those after the tokens of its draft.
        self._held: dict[LiveRequest, list[_Held]] = {}
        self._packing = Packing(specs)
        self._snapshots: dict[int, list[mx.array]] = {}  # packed
        self._fresh: list[mx.array] = []

    @property
    def num_snapshots(self) -> int:
        return len(self._snapshots)

    @property
    def nbytes(self) -> int:
        """Bytes of one sequence's state."""
        return sum(spec.nbytes for spec in self.specs)

    def drop(self, ids: Iterable[int]) -> list[LiveRequest]:
        """Drop these snapshots and the states of finished requests; return the latter."""
        for id_ in ids:
            del self._snapshots[id_]
        ended = [r for r in self._held if r.state is not RequestState.RUNNING]
        for request in ended:
            del self._held[request]
        return ended

    def clear(self) -> None:
        self._held.clear()
        self._snapshots.clear()
        self._fresh = []

    def check(self, ids: Iterable[int]) -> None:
        """Audit: exactly these snapshots exist. Raises AssertionError."""
        assert set(ids) == self._snapshots.keys(), "snapshots and the scheduler's ids differ"

    # ---- snapshots as bytes

    def read_units(self, ids: Sequence[int]) -> list[bytes]:
        """Serialise snapshots: their arrays one after another, layer by layer.

        No step may be under way.
        """
        return [self._packing.to_bytes(self._snapshots[id_]) for id_ in ids]

    def write_units(self, ids: Sequence[int], payloads: Sequence[bytes]) -> None:
        """Restore under new ids what `read_units` returned for a model with the same states."""
        for id_, payload in zip(ids, payloads, strict=True):
            packed = self._packing.from_bytes(payload)
            evaluate(*packed)
            self._snapshots[id_] = packed

    # ---- a step

    def groups(self, chunks: Sequence[Chunk], num_decodes: int) -> list[Group]:
        """Divide the step's rows into groups, with their initial states."""
        for chunk in chunks:
            if chunk.draft:
                return self._with_drafts(chunks)
        groups = []
        begin = 0
        for is_first, some in groupby(chunks[:num_decodes], lambda chunk: chunk.start == 0):
            for decodes in [(chunk,) for chunk in some] if is_first else [tuple(some)]:
                groups.append(self._decodes(decodes, begin))
                begin += len(decodes)
        row = num_decodes
        for chunk in chunks[num_decodes:]:
            groups += self._segments(chunk, row)
            row += chunk.length
        return groups

    def _with_drafts(self, chunks: Sequence[Chunk]) -> list[Group]:
        """Group the rows of drafts with those of decodes, before all other rows of the step."""
        decodes: list[tuple[Chunk, int]] = []  # with their first rows
        others: list[Group] = []
        row = 0
        for chunk in chunks:
            if chunk.length - len(chunk.draft) > 1:
                others += self._segments(chunk, row)
            elif chunk.start == 0:
                others.append(self._decodes((chunk,), row))
            else:
                decodes.append((chunk, row))
            row += chunk.length
        if self._replay is not None:
            before = self._stack([self._before(chunk) for chunk, _ in decodes])
            num_layers = len(self.specs)
            return [group_of_drafts(decodes, before, num_layers, self._replay), *others]
        decodes.sort(key=lambda decode: len(decode[0].draft))
        return [*self._of_drafts(decodes), *others]

    def groups_of_sequences(self, chunks: Sequence[Chunk]) -> list[Group]:
        """Divide the step's rows into groups of one sequence each."""
        groups: list[Group] = []
        row = 0
        for chunk in chunks:
            if chunk.draft and self.is_used:
                groups += self._of_drafts([(chunk, row)])
            else:
                groups += self._segments(chunk, row)
            row += chunk.length
        return groups

    def _of_drafts(self, decodes: Sequence[tuple[Chunk, int]]) -> list[Group]:
        before = self._stack([self._before(chunk) for chunk, _ in decodes])
        return groups_of_drafts(decodes, before, len(self.specs))

    def _decodes(self, chunks: tuple[Chunk, ...], first: int) -> Group:
        """Group decodes, or a prompt of one token."""
        held = [self._before(chunk) for chunk in chunks]
        keeps = [(row, id_) for row, chunk in enumerate(chunks) for _, id_ in kept_states(chunk)]
        return Group(
            first,
            len(chunks),
            1,
            chunks,
            chunks[0].start,
            self._stack(held),
            keeps=tuple(keeps),
            after=[None] * len(self.specs),
        )

    def _segments(self, chunk: Chunk, first: int) -> list[Group]:
        """Cut a chunk, whose first row is `first`, into groups where its state is kept."""
        groups: list[Group] = []
        ids = dict(kept_states(chunk))
        start = chunk.start
        for end in sorted({*ids, chunk.end}):
            before = None if groups else self._stack([self._before(chunk)])
            keeps = ((0, ids[end]),) if end in ids else ()
            previous = groups[-1] if groups else None
            row = first + start - chunk.start
            group = Group(row, 1, end - start, (chunk,), start, before, previous, keeps)
            group.after = [None] * len(self.specs)
            groups.append(group)
            start = end
        return groups

    def commit(self, groups: Sequence[Group]) -> None:
        """Store the states that the groups left, once the step's graph is built."""
        self._fresh = []
        if not self.is_used:
            return
        for group in groups:
            if group.drafts is not None:
                self._commit_drafts(group, group.drafts)
                continue
            # A convolution's state may be a view of the chunk's last tokens, and keep all of them.
            is_copied = group.length > 1 and not group.is_within_chunk
            stack = [
                self._filled(arrays, spec, group.batch, is_copied)
                for arrays, spec in zip(group.after, self.specs, strict=True)
            ]
            for row, id_ in group.keeps:
                self._snapshots[id_] = self._packing.pack(stack, row)
                self._fresh += self._snapshots[id_]
            if group.is_within_chunk:
                # The next group continues from it.
                continue
            self._fresh += [array for layer in stack for array in layer]
            self._hold(group, stack)

    def _commit_drafts(self, group: Group, drafts: DraftRows) -> None:
        for row, id_ in group.keeps:
            self._snapshots[id_] = self._packing.pack(drafts.at([row]), 0)
            self._fresh += self._snapshots[id_]
        assert len(drafts.after) == len(self.specs), "a recurrent layer was not called"
        self._fresh += drafts.arrays()
        self._hold(group, drafts)

    def _hold(self, group: Group, stack: Stack | DraftRows) -> None:
        for row, (chunk, start) in enumerate(zip(group.chunks, group.positions, strict=True)):
            held = _Held(stack, group.batch, row, start + group.length)
            if group.continues(row):
                self._held[chunk.request].append(held)
            else:
                self._held[chunk.request] = [held]

    @staticmethod
    def _filled(
        arrays: Arrays | None, spec: StateSpec, batch: int, is_copied: bool
    ) -> list[mx.array]:
        """Return the arrays that a layer left; zeros for those that it did not set.

        is_copied: for arrays that may be views of tokens, which a matrix of each head is not
        """
        assert arrays is not None, "a recurrent layer was not called"
        return [
            mx.zeros((batch, *shape), dtype)
            if array is None
            else (mx.contiguous(array) if is_copied and len(shape) < 3 else array)
            for array, (shape, dtype) in zip(arrays, spec.arrays, strict=True)
        ]

    def arrays(self) -> list[mx.array]:
        """Arrays to evaluate with the step; otherwise the graph would grow with every step."""
        return self._fresh

    def _before(self, chunk: Chunk) -> _Held | None:
        """Return the state before a chunk; None at the start of a sequence."""
        if not self.is_used:
            return None
        if chunk.state is not None and chunk.state.restore is not None:
            snapshot = self._packing.unpack(self._snapshots[chunk.state.restore])
            return _Held(snapshot, 1, 0, chunk.start)
        if chunk.start == 0:
            return None
        held = self._held[chunk.request]
        first = held[0].position
        assert first <= chunk.start < first + len(held), (
            f"{chunk.request.id}: its states have seen {first} to {held[-1].position} tokens, the "
            f"chunk begins at {chunk.start}"
        )
        return held[chunk.start - first]

    def _stack(self, held: Sequence[_Held | None]) -> Stack | None:
        """Return one stack of all rows, uncopied if they form one already; None at a start."""
        if held == [None]:
            return None
        parts: dict[int, tuple[_Held, list[int]]] = {}  # by the identity of a stack: its rows
        for state in held:
            assert state is not None, "a beginning is not in a batch"
            parts.setdefault(id(state.stack), (state, []))[1].append(state.row)
        first, rows = next(iter(parts.values()))
        if len(parts) == 1:
            return _narrowed(first, rows)
        stacks = [_narrowed(part, rows) for part, rows in parts.values()]
        index = _index(held, {key: len(rows) for key, (_, rows) in parts.items()})
        return [
            [_joined([stack[layer][at] for stack in stacks], index) for at in range(num_arrays)]
            for layer, num_arrays in enumerate(len(spec.arrays) for spec in self.specs)
        ]


def _narrowed(part: _Held, rows: list[int]) -> Stack:
    """Return these rows of a stack: what is left of a large one, or of drafts, is not copied."""
    if isinstance(part.stack, DraftRows):
        return part.stack.at(rows)
    if rows == list(range(part.batch)):
        return part.stack
    index = mx.array(rows)
    return [[array[index] for array in layer] for layer in part.stack]


def _index(held: Sequence[_Held | None], sizes: Mapping[int, int]) -> mx.array | None:
    """Return for each state its row in the concatenated stacks; None if they are in order."""
    nexts = dict(zip(sizes, accumulate(sizes.values(), initial=0), strict=False))
    index = []
    for state in held:
        assert state is not None
        index.append(nexts[id(state.stack)])
        nexts[id(state.stack)] += 1
    return None if index == list(range(len(index))) else mx.array(index)


def _joined(parts: list[mx.array], index: mx.array | None) -> mx.array:
    whole = parts[0] if len(parts) == 1 else mx.concatenate(parts)
    return whole if index is None else whole[index]

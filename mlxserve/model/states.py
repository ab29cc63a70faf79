"""StateStore: the recurrent states of running sequences, and snapshots of them by id.

A recurrent layer keeps a few arrays of fixed size for a sequence instead of keys and values. They
are never written in place: the layer returns new ones, so that a step can be launched while the one
before is still being computed. Decodes are rows of one stack: as long as the same sequences decode in
the same order, the next step takes the stack as it is.

    held        of each running request: a row of a stack, and the position it has reached
    snapshots   by id, one packed row each; which ones exist is up to the scheduler
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import mlx.core as mx

from metal_kernels.reading import evaluate
from mlxserve.model.packed_states import Packing, Stack, StateSpec
from mlxserve.request import Chunk, LiveRequest, RequestState

# What a layer begins with: None is the beginning of a sequence, which to some layers is not the same
# as zeros (the first token of RecurrentGemma's is scaled differently).
Arrays = Sequence[mx.array | None]


@dataclass(slots=True)
class _Held:
    """A sequence's state: a row of a stack."""

    stack: Stack
    batch: int  # rows of the stack
    row: int
    position: int  # tokens that it has seen


@dataclass(slots=True)
class Group:
    """Consecutive rows of a step that recurrent layers see as (batch, length).

    The decodes of a step are one group; a chunk is one, or several if its state is kept within it.
    """

    first: int  # row of the step
    batch: int
    length: int
    chunks: tuple[Chunk, ...]  # one for each row of the batch
    start: int  # position of the first row, in a batch of one
    before: Stack | None  # None: the beginning of a sequence, or what `previous` leaves
    previous: Group | None = None
    keeps: tuple[tuple[int, int], ...] = ()  # (row of the batch, id of the snapshot)
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
        return arrays

    @property
    def is_within_chunk(self) -> bool:
        """True if its chunk continues after it."""
        return self.batch == 1 and self.start + self.length < self.chunks[0].end

    @property
    def positions(self) -> list[int]:
        """Position of the first token of each row of the batch."""
        return [self.start] if self.batch == 1 else [chunk.start for chunk in self.chunks]


class StateStore:
    """The recurrent states of one model. Lives on the engine's thread."""

    def __init__(self, specs: Sequence[StateSpec], *, is_used: bool | None = None) -> None:
        """`is_used`: whether the model has recurrent states; some of its ranks may have none."""
        self.specs = tuple(specs)
        self.is_used = bool(specs) if is_used is None else is_used
        self._held: dict[LiveRequest, _Held] = {}
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
        for group in groups:
            group.after = [None] * len(self.specs)
        return groups

    def _decodes(self, chunks: tuple[Chunk, ...], first: int) -> Group:
        """Group decodes, or a prompt of one token."""
        held = [self._before(chunk) for chunk in chunks]
        keeps = [(row, id_) for row, chunk in enumerate(chunks) for _, id_ in _keeps(chunk)]
        return Group(
            first, len(chunks), 1, chunks, chunks[0].start, self._stack(held), None, tuple(keeps)
        )

    def _segments(self, chunk: Chunk, first: int) -> list[Group]:
        """Cut a chunk, whose first row is `first`, into groups where its state is kept."""
        groups: list[Group] = []
        ids = dict(_keeps(chunk))
        start = chunk.start
        for end in sorted({*ids, chunk.end}):
            before = None if groups else self._stack([self._before(chunk)])
            keeps = ((0, ids[end]),) if end in ids else ()
            previous = groups[-1] if groups else None
            row = first + start - chunk.start
            groups.append(Group(row, 1, end - start, (chunk,), start, before, previous, keeps))
            start = end
        return groups

    def commit(self, groups: Sequence[Group]) -> None:
        """Store the states that the groups left, once the step's graph is built."""
        self._fresh = []
        if not self.is_used:
            return
        for group in groups:
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
            for row, (chunk, start) in enumerate(zip(group.chunks, group.positions, strict=True)):
                self._held[chunk.request] = _Held(stack, group.batch, row, start + group.length)

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
        assert held.position == chunk.start, (
            f"{chunk.request.id}: its state has seen {held.position} tokens, the chunk begins at "
            f"{chunk.start}"
        )
        return held

    def _stack(self, held: Sequence[_Held | None]) -> Stack | None:
        """Return one stack of all rows, uncopied if they form one already; None at a start."""
        if held == [None]:
            return None
        stacks: dict[int, tuple[int, Stack]] = {}  # by identity: (first row in the sum, stack)
        rows, total = [], 0
        for state in held:
            assert state is not None, "a beginning is not in a batch"
            if id(state.stack) not in stacks:
                stacks[id(state.stack)] = total, state.stack
                total += state.batch
            rows.append(stacks[id(state.stack)][0] + state.row)
        index = None if rows == list(range(total)) else mx.array(rows)
        parts = [stack for _, stack in stacks.values()]
        if len(parts) == 1 and index is None:
            return parts[0]
        return [
            [_joined([part[layer][at] for part in parts], index) for at in range(len(spec.arrays))]
            for layer, spec in enumerate(self.specs)
        ]


def _joined(parts: list[mx.array], index: mx.array | None) -> mx.array:
    whole = parts[0] if len(parts) == 1 else mx.concatenate(parts)
    return whole if index is None else whole[index]


def _keeps(chunk: Chunk) -> Sequence[tuple[int, int]]:
    return chunk.state.keeps if chunk.state is not None else ()

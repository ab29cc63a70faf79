"""MLX's rules for the memory of Metal command buffers, replayed over a list of operations.

From `backend/metal/device.cpp` and `eval.cpp` of MLX and its 0.32 wheels:

* a command buffer is committed after an operation if it has more than `max_ops` dispatches, or if
  the arrays bound as inputs, each counted once, have more than `max_mb` million (2**20) elements;
* the inputs of an operation stay alive until its command buffer completes;
* an operation whose input nobody needs any more may write its output over it;
* freed memory is used again for an array that is at most two pages smaller (`BufferCache`);
* evaluation waits when 11 command buffers are under way (`MAX_ACTIVE_TASKS` of transforms.cpp is 10);
  those that an evaluation ends itself are not among them.

And ours (`mlxserve/model/command_buffers.py`): in a step with chunks evaluation begins after a layer's keys, which
ends the command buffer, and waits for the oldest one where too many rows are under way.

The device is taken to complete a command buffer only when evaluation waits for it: encoding is far
ahead of a long step.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

_MAX_UNDER_WAY = 11


@dataclass(eq=False, slots=True)
class Array:
    """`num_elements` of its dtype: a packed 4-bit weight has an eighth of its parameters."""

    num_elements: int
    nbytes: int
    is_permanent: bool = False  # weights and pools, which are not a step's memory


@dataclass(frozen=True, slots=True)
class Operation:
    """`output` may be one of the inputs, which is then overwritten.

    num_rows: of the layers since the last evaluation, if one begins after it
    """

    inputs: tuple[Array, ...]
    output: Array
    num_dispatches: int = 1
    num_rows: int = 0


@dataclass(frozen=True, slots=True)
class Limits:
    max_ops: int
    max_mb: int
    max_rows: int | None = None  # of layers under way; None: nothing but MLX ends a command buffer


@dataclass(slots=True)
class _CommandBuffer:
    num_ops: int = 0
    counted: set[Array] = field(default_factory=set)
    num_elements: int = 0
    kept: set[Array] = field(default_factory=set)
    num_rows: int = 0  # of the evaluation that ended it; 0 if MLX did

    def must_commit(self, limits: Limits) -> bool:
        return self.num_ops > limits.max_ops or self.num_elements >> 20 > limits.max_mb


@dataclass(frozen=True, slots=True)
class Replay:
    """What an evaluation took: the most bytes alive at once, weights and pools aside."""

    peak: int
    num_buffers: int


def peak(operations: Sequence[Operation], limits: Limits) -> int:
    return replay(operations, limits).peak


def replay(operations: Sequence[Operation], limits: Limits) -> Replay:
    """Evaluate `operations`, and commit what is left at the end."""
    readers = Counter(array for op in operations for array in set(op.inputs))
    created: set[Array] = set()
    memory = _Memory()
    buffers: deque[_CommandBuffer] = deque([_CommandBuffer()])
    num_buffers = 1

    def complete_first() -> None:
        for array in buffers.popleft().kept:
            memory.release(array)

    for op in operations:
        for array in {*op.inputs, op.output} - created:
            memory.hold(array)  # as the graph does until the last reader is encoded
        created |= {*op.inputs, op.output}
        _encode(op, buffers[-1], memory)
        for array in set(op.inputs):
            readers[array] -= 1
            if not readers[array]:
                memory.release(array)
        num_rows = 0 if limits.max_rows is None else op.num_rows
        if not num_rows and not buffers[-1].must_commit(limits):
            continue
        buffers[-1].num_rows = num_rows
        buffers.append(_CommandBuffer())
        num_buffers += 1
        while sum(not buffer.num_rows for buffer in buffers) > _MAX_UNDER_WAY:
            complete_first()
        while sum(buffer.num_rows for buffer in buffers) > (limits.max_rows or 0):
            complete_first()
    return Replay(memory.highest, num_buffers - (not buffers[-1].num_ops))


class BufferCache:
    """MLX's freed buffers (`backend/common/buffer_cache.h`, `metal/allocator.cpp`).

    fresh: the sizes of the buffers that the device had to make
    """

    def __init__(self, limit: int, page: int = 16 << 10) -> None:
        """
        limit: bytes of freed buffers that are kept
        page: bytes of a page of the machine's memory
        """
        self.fresh: list[int] = []
        self._limit, self._page = limit, page
        self._freed: list[int] = []  # in the order in which they were freed

    def allocate(self, nbytes: int) -> int:
        """Return the bytes of the buffer that an array of `nbytes` gets."""
        size = -(-nbytes // self._page) * self._page
        end = min(2 * size, size + 2 * self._page)
        reused = min((freed for freed in self._freed if size <= freed < end), default=None)
        if reused is None:
            self.fresh.append(size)
        else:
            self._freed.remove(reused)
        while sum(self._freed) > self._limit:
            self._freed.pop(0)
        return size if reused is None else reused

    def free(self, size: int) -> None:
        if sum(self._freed) < self._limit:
            self._freed.append(size)


def _encode(op: Operation, buffer: _CommandBuffer, memory: _Memory) -> None:
    buffer.num_ops += op.num_dispatches
    for array in op.inputs:
        if array not in buffer.counted:
            buffer.counted.add(array)
            buffer.num_elements += array.num_elements
        if array is not op.output and array not in buffer.kept:
            buffer.kept.add(array)
            memory.hold(array)


class _Memory:
    """Bytes of the arrays that somebody holds."""

    def __init__(self) -> None:
        self._holders: Counter[Array] = Counter()
        self._now = 0
        self.highest = 0

    def hold(self, array: Array) -> None:
        if array.is_permanent:
            return
        self._holders[array] += 1
        if self._holders[array] == 1:
            self._now += array.nbytes
            self.highest = max(self.highest, self._now)

    def release(self, array: Array) -> None:
        if array.is_permanent:
            return
        self._holders[array] -= 1
        assert self._holders[array] >= 0, "released twice"
        if not self._holders[array]:
            del self._holders[array]
            self._now -= array.nbytes

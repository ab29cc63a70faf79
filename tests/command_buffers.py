"""MLX's rules for the memory of Metal command buffers, replayed over a list of operations.

From `backend/metal/device.cpp` and `eval.cpp` of MLX and its 0.32 wheels:

* a command buffer is committed after an operation if it has more than `max_ops` dispatches, or if
  the arrays bound as inputs, each counted once, have more than `max_mb` million (2**20) elements;
* the inputs of an operation stay alive until its command buffer completes;
* an operation whose input nobody needs any more may write its output over it;
* evaluation waits when 11 command buffers are under way (`MAX_ACTIVE_TASKS` of transforms.cpp is 10).

The device is taken to complete a command buffer only when evaluation waits for it: encoding is far
ahead of a long step.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

_MOST_UNDER_WAY = 11


@dataclass(eq=False, slots=True)
class Array:
    """`num_elements` of its dtype: a packed 4-bit weight has an eighth of its parameters."""

    num_elements: int
    nbytes: int
    is_permanent: bool = False  # weights and pools, which are not a step's memory


@dataclass(frozen=True, slots=True)
class Operation:
    """`output` may be one of the inputs, which is then overwritten."""

    inputs: tuple[Array, ...]
    output: Array
    num_dispatches: int = 1


@dataclass(frozen=True, slots=True)
class Limits:
    max_ops: int
    max_mb: int


@dataclass(slots=True)
class _CommandBuffer:
    num_ops: int = 0
    counted: set[Array] = field(default_factory=set)
    num_elements: int = 0
    kept: set[Array] = field(default_factory=set)

    def must_commit(self, limits: Limits) -> bool:
        return self.num_ops > limits.max_ops or self.num_elements >> 20 > limits.max_mb


def peak(operations: Sequence[Operation], limits: Limits) -> int:
    """Most bytes alive at once while `operations` are evaluated, weights and pools aside."""
    readers = Counter(array for op in operations for array in set(op.inputs))
    created: set[Array] = set()
    memory = _Memory()
    buffers: deque[_CommandBuffer] = deque([_CommandBuffer()])
    for op in operations:
        for array in {*op.inputs, op.output} - created:
            memory.hold(array)  # as the graph does until the last reader is encoded
        created |= {*op.inputs, op.output}
        _encode(op, buffers[-1], memory)
        for array in set(op.inputs):
            readers[array] -= 1
            if not readers[array]:
                memory.release(array)
        if buffers[-1].must_commit(limits):
            buffers.append(_CommandBuffer())
            if len(buffers) > _MOST_UNDER_WAY:
                for array in buffers.popleft().kept:
                    memory.release(array)
    return memory.highest


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

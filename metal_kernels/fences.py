"""Fences: the order in which kernels may touch a pool that is written in place.

MLX believes that a pool is only ever read, so it would let a write and a read overlap. What it
does keep in order is a kernel and those that made its inputs. So every kernel that touches a pool
returns a small token, its *fence*, and binds the fences of those it must wait for:

    write ──▶ read (decodes) ──▶ write of the next step
      └─────▶ read (chunks)  ──────▶┘

A reader waits for the last write, a writer for the last write and all reads since. The second
half is what lets a page that was freed be written again while the step that read it is still
being computed.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.core as mx

# Fences a writer binds: a step reads a pool at most twice, decodes and chunks.
NUM_WAITS = 2


@dataclass(slots=True)
class _History:
    """The last accesses to a pool."""

    pool: weakref.ref[mx.array]
    write: mx.array
    reads: list[mx.array] = field(default_factory=list)  # since that write
    kind: int | None = None


class Fences:
    """The fences of every pool of a backend, by the pool's keys."""

    def __init__(self) -> None:
        self._histories: dict[int, _History] = {}
        self._kinds: dict[tuple[object, ...], int] = {}  # numbered as they are met

    def add(self, pool: mx.array) -> None:
        """Add a new pool, which no kernel has touched yet."""
        key = id(pool)

        def forget(gone: weakref.ref[mx.array]) -> None:
            if self._histories[key].pool is gone:
                del self._histories[key]

        start = mx.zeros(8, mx.int32)
        self._histories[key] = _History(weakref.ref(pool, forget), start)

    def kind(self, k_pool: mx.array, v_pool: mx.array) -> int:
        """A number that is equal for pools of equal shapes and dtypes: a key of plans.

        mlx makes both anew for each access, and a dtype's hash takes as long as a call of an op.
        """
        history = self._of(k_pool)
        if history.kind is None:
            key = k_pool.shape, k_pool.dtype, v_pool.shape, v_pool.dtype
            history.kind = self._kinds.setdefault(key, len(self._kinds))
        return history.kind

    def before_read(self, pool: mx.array) -> mx.array:
        """Return the fence that a reader binds."""
        history = self._of(pool)
        # One more reader than a writer can wait for queues behind another one.
        return history.reads[0] if len(history.reads) == NUM_WAITS else history.write

    def after_read(self, pool: mx.array, fence: mx.array) -> None:
        history = self._of(pool)
        if len(history.reads) == NUM_WAITS:
            history.reads.pop(0)
        history.reads.append(fence)

    def before_write(self, pool: mx.array) -> tuple[mx.array, mx.array]:
        """Return the fences that a writer binds."""
        history = self._of(pool)
        first, second = (*history.reads, history.write, history.write)[:NUM_WAITS]
        return first, second

    def after_write(self, pool: mx.array, fence: mx.array) -> None:
        history = self._of(pool)
        history.write = fence
        history.reads.clear()

    def state(self, pools: Sequence[mx.array]) -> list[list[mx.array]]:
        """Return the fences that each pool's next writer binds, to resume from."""
        return [list(self.before_write(pool)) for pool in pools]

    def resume(self, pools: Sequence[mx.array], state: Sequence[list[mx.array]]) -> None:
        """Resume from what `state` returned for these pools.

        If the last access is a read, what waits for it in the place of the write waits for both.
        """
        for pool, (*reads, last) in zip(pools, state, strict=True):
            history = self._of(pool)
            history.write, history.reads = last, reads

    def pending(self) -> list[mx.array]:
        """Arrays to evaluate for every pool to hold all that was written."""
        return [
            fence
            for history in self._histories.values()
            for fence in (history.write, *history.reads)
        ]

    def _of(self, pool: mx.array) -> _History:
        history = self._histories.get(id(pool))
        if history is None:
            raise ValueError(
                "this pool is not one that new_pool returned: pools are written in place, so they "
                "are passed whole and never replaced by a slice or a copy"
            )
        return history

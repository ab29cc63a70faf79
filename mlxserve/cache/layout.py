"""StepLayout: where the rows of one step are in the pool.

rows   | decodes: one row per sequence | chunks: the rows of each sequence in order           |
         0 .............. num_decodes    num_decodes ................................... T
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import mlx.core as mx

from metal_kernels.ops import Slots
from metal_kernels.tables import Plans, SequenceTables


@dataclass(frozen=True, slots=True)
class StepLayout:
    """One step's rows. Decodes and chunks are two dispatches over disjoint ranges of rows."""

    positions: mx.array  # (T,) int32, of each row in its sequence
    slots: Slots  # (T,) int32, the slot that each row's KV is written to
    num_decodes: int
    decodes: SequenceTables | None  # None if the step has no decodes
    chunks: SequenceTables | None  # None if the step has no chunks
    # Called with the keys that a layer writes.
    after_layer: Callable[[mx.array], None] | None = None
    # (1,) int32: of a step that is one chunk and is called as (1, T), the position of its first row.
    offset: mx.array | None = None
    windows: StepLayout | None = None  # the same rows in the pool of layers with a window
    # The chunks as layers with a window see them, where rows of an image see more there; else None.
    windowed: SequenceTables | None = None
    adapters: tuple[mx.array, mx.array] | None = None  # `RowAdapters` of the rows, if any has one
    # Cosines and sines of the rows by their rope, made by the first layer that needs them.
    turns: dict[object, mx.array] = field(default_factory=dict)
    # Backends' plans for `slots`; layouts do not share them.
    plans: Plans = field(default_factory=Plans, init=False, repr=False, compare=False)

    @property
    def by_pool(self) -> tuple[StepLayout, ...]:
        """The rows in each pool, in the order of `StepPools`."""
        return (self,) if self.windows is None else (self, self.windows)

    def with_windows(
        self, slots: Slots, decodes: SequenceTables | None, chunks: SequenceTables | None
    ) -> StepLayout:
        """Return the layout with that of the same rows in the pool of layers with a window."""
        return replace(self, windows=replace(self, slots=slots, decodes=decodes, chunks=chunks))

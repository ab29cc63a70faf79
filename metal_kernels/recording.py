"""StepInputs: the arrays that differ between two steps of as many decodes, besides rows and fences.

The graph of such a step is recorded by mx.compile and built again without Python for each layer. In
a recording, everything that is not an argument is a constant. So layers are given stand-ins for the
step's
numbers: slots whose values are meaningless, and tables that have none (`RecordedTables`).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import mlx.core as mx
import numpy as np

from metal_kernels.ops import Slots
from metal_kernels.plans import WritePlan
from metal_kernels.tables import Arrays, MakeArrays, Plans, RecordedTables, SequenceTables
from metal_kernels.writes import keep_moves, row_moves


@dataclass(frozen=True)
class StepInputs:
    """The arrays that the kernels of a step of decodes read."""

    num_rows: int
    page_size: int
    moves: mx.array  # (num_rows, 2) int32: row, slot
    uploads: dict[Hashable, Arrays]  # arrays of the page tables

    @classmethod
    def collect(
        cls,
        slots: Slots,
        plans: Plans,
        tables: SequenceTables,
        makers: Mapping[Hashable, MakeArrays],
        k_pool: mx.array,
    ) -> StepInputs:
        """Collect the arrays. Raises ValueError for slots and pages outside the pool.

        plans: of the slots; makers: what the same layers uploaded in another step
        """
        num_slots = k_pool.shape[0] * tables.page_size
        last = max(int(slots.max()), (tables.highest_page + 1) * tables.page_size - 1)
        if not 0 <= int(slots.min()) <= last < num_slots:
            raise ValueError(f"slots and pages must be within {num_slots} slots")
        uploads = {key: tables.upload(key, make) for key, make in makers.items()}
        moves = row_moves(slots, plans).tokens_on_device
        return cls(len(slots), tables.page_size, moves, uploads)

    @property
    def shapes(self) -> tuple[Hashable, ...]:
        """A key: steps with equal shapes have the same graph."""
        return (self.num_rows, *(array.shape for array in self.arrays()))

    def arrays(self) -> list[mx.array]:
        return [self.moves, *(array for arrays in self.uploads.values() for array in arrays)]

    def over(self, arrays: Sequence[mx.array]) -> StepInputs:
        """Return the inputs with other arrays, in the order of `arrays`."""
        moves, *rest = arrays
        others = iter(rest)
        uploads = {key: tuple(next(others) for _ in old) for key, old in self.uploads.items()}
        return StepInputs(self.num_rows, self.page_size, moves, uploads)

    @cached_property
    def slots(self) -> Slots:
        """Placeholder slots, as many as the step's."""
        return np.zeros(self.num_rows, np.int32)

    def keep_moves(self, plans: Plans) -> None:
        """Store the step's targets in the plans of `slots`, whose values are then ignored."""
        none, some = np.zeros((0, 2), np.int32), np.zeros((self.num_rows, 2), np.int32)
        keep_moves(WritePlan(none, some, self.moves, self.moves), plans)

    @property
    def tables(self) -> RecordedTables:
        return RecordedTables(self.num_rows, self.page_size, self.uploads)

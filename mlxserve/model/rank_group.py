"""RankGroup: the ranks of one engine as a mx.distributed group, and their agreements.

Rule: the collectives of a step form one chain, and every rank evaluates its end. mlx has one queue
    for communication in each process, in the order in which graphs are evaluated; two ranks that
    disagree about that order wait for each other for ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import mlx.core as mx

from metal_kernels.reading import read
from mlxserve.core.errors import EngineStopped


class Split(StrEnum):
    """The ways to divide a model among ranks."""

    HEADS = "heads"  # tensor parallel: each rank has some heads of every layer
    LAYERS = "layers"  # pipeline parallel: each rank has some layers


# mx.distributed has one group in the life of a process.
_joined: list[Split] = []


class RankGroup:
    """This process among `size`. Lives on the engine's thread."""

    def __init__(
        self, split: Split, size: int, backend: str = "any", *, num_on_this_machine: int = 1
    ) -> None:
        """Join the group, whose other ranks must be joining now. Raises EngineStopped.

        mx.distributed waits for them without a timeout.

        num_on_this_machine: ranks that share this machine's memory
        """
        if _joined:
            raise EngineStopped(
                "A process can join a group of ranks once, and this one has. Start a new process."
            )
        _joined.append(split)
        try:
            self.mx_group = mx.distributed.init(strict=True, backend=backend)
        except (RuntimeError, ValueError) as error:
            raise EngineStopped(
                f"mx.distributed cannot start with distributed_backend={backend}: {error}"
            ) from error
        self.rank: int = self.mx_group.rank()
        self.size: int = self.mx_group.size()
        self.split = split
        self.num_on_this_machine = num_on_this_machine
        # "any" may find a group of one.
        if self.size != size:
            raise EngineStopped(
                f"mx.distributed found {self.size} ranks instead of {size}. Start all of them with "
                "mlx.launch, or leave hostfile out to run all ranks on this machine."
            )

    @property
    def is_lead(self) -> bool:
        """True if this rank samples. In a pipeline it has the last layers."""
        return self.rank == 0

    @property
    def has_embedding(self) -> bool:
        """True if tokens enter here: in a pipeline at the last rank, which has the first layers."""
        return self.split is Split.HEADS or self.rank == self.size - 1

    def all_of(self, numbers: Sequence[int]) -> list[list[int]]:
        """Gather the numbers of every rank, exact below 2**62. All ranks pass equally many."""
        halves = [half for n in numbers for half in (n >> 31, n & (1 << 31) - 1)]
        gathered = mx.distributed.all_gather(mx.array([halves], mx.int32), group=self.mx_group)
        rows: list[list[int]] = read(gathered).tolist()
        return [
            [(high << 31) + low for high, low in zip(row[::2], row[1::2], strict=True)]
            for row in rows
        ]

    def all_min(self, number: int) -> int:
        return min(row[0] for row in self.all_of([number]))

    def all_max(self, number: int) -> int:
        return max(row[0] for row in self.all_of([number]))

    def all_max_float(self, number: float) -> float:
        """Maximum over all ranks; NaN if any rank has NaN."""
        gathered = mx.distributed.all_gather(mx.array([number], mx.float32), group=self.mx_group)
        return float(read(mx.max(gathered)).item())

    def from_lead(self, numbers: Sequence[int]) -> list[int]:
        """Return rank 0's numbers."""
        return self.all_of(numbers)[0]

    def share(self, ids: mx.array) -> mx.array:
        """Broadcast rank 0's (rows,) ids to every rank, as part of the graph."""
        return mx.distributed.all_gather(ids[None], group=self.mx_group)[0]

    def send(self, x: mx.array, rank: int) -> mx.array:
        """Send x to `rank`, and return x dependent on it."""
        return mx.distributed.send(x, rank, group=self.mx_group)

    def receive_like(self, x: mx.array, rank: int) -> mx.array:
        """Receive from `rank` an array of the shape and dtype of x, which is not computed."""
        return mx.distributed.recv_like(x, rank, group=self.mx_group)

"""Crew: the ranks of one engine as a group of mx.distributed, and what they agree on.

Rule: the collectives of a step form one chain, and every rank evaluates its end. mlx has one queue for
communication in each process, in the order in which graphs are evaluated; two ranks that disagree
about that order wait for each other for ever.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from metal_kernels.reading import read
from mlxserve.distributed.environment import Split
from mlxserve.errors import EngineStopped

_joined: list[Split] = []  # mx.distributed has one group in the life of a process


class Crew:
    """This process among `size`. Lives on the engine's thread."""

    def __init__(self, split: Split, size: int, backend: str = "any") -> None:
        """Join the group, whose other ranks must be doing so now: mx.distributed waits for them
        without an end. Raises EngineStopped."""
        if _joined:
            raise EngineStopped(
                "A process can join a group of ranks once, and this one has. Start a new process."
            )
        _joined.append(split)
        try:
            self.group = mx.distributed.init(strict=True, backend=backend)
        except (RuntimeError, ValueError) as error:
            raise EngineStopped(
                f"mx.distributed cannot start with distributed_backend={backend}: {error}"
            ) from error
        self.rank: int = self.group.rank()
        self.size: int = self.group.size()
        self.split = split
        if self.size != size:  # "any" may find a group of one
            raise EngineStopped(
                f"mx.distributed found {self.size} ranks instead of {size}. Start all of them with "
                "mlx.launch, or leave hostfile out to run all ranks on this machine."
            )

    @property
    def is_lead(self) -> bool:
        """Whether this rank samples. In a pipeline it has the last layers."""
        return self.rank == 0

    @property
    def has_embedding(self) -> bool:
        """Whether tokens enter here: in a pipeline at the last rank, which has the first layers."""
        return self.split is Split.HEADS or self.rank == self.size - 1

    def all_of(self, numbers: Sequence[int]) -> list[list[int]]:
        """The numbers of every rank, exact below 2**62. All ranks give equally many."""
        halves = [half for n in numbers for half in (n >> 31, n & (1 << 31) - 1)]
        gathered = mx.distributed.all_gather(mx.array([halves], mx.int32), group=self.group)
        rows: list[list[int]] = read(gathered).tolist()
        return [
            [(high << 31) + low for high, low in zip(row[::2], row[1::2], strict=True)]
            for row in rows
        ]

    def least(self, number: int) -> int:
        return min(row[0] for row in self.all_of([number]))

    def most(self, number: int) -> int:
        return max(row[0] for row in self.all_of([number]))

    def largest(self, number: float) -> float:
        """Of all ranks; NaN if one has NaN."""
        gathered = mx.distributed.all_gather(mx.array([number], mx.float32), group=self.group)
        return float(read(mx.max(gathered)).item())

    def from_lead(self, numbers: Sequence[int]) -> list[int]:
        """Rank 0's numbers."""
        return self.all_of(numbers)[0]

    def share(self, ids: mx.array) -> mx.array:
        """Rank 0's (rows,) ids on every rank, as part of the graph."""
        return mx.distributed.all_gather(ids[None], group=self.group)[0]

    def send(self, x: mx.array, rank: int) -> mx.array:
        """x, once it is sent to `rank`."""
        return mx.distributed.send(x, rank, group=self.group)

    def receive_like(self, x: mx.array, rank: int) -> mx.array:
        """What `rank` sends: an array of the shape and dtype of x, which is not computed."""
        return mx.distributed.recv_like(x, rank, group=self.group)

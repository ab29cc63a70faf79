"""StepWay: ways of a step that write and read pools otherwise than op by op, each proved alone.

The self-test (`selftest.py`) goes each of them. Steps go without one whose test fails.
"""

from __future__ import annotations

from enum import Enum


class StepWay(Enum):
    """Names a way as the logs do."""

    ROTATED = "rotate-and-write"  # rows are rotated and written by one kernel
    GATHERED = "gathered chunks"  # MLX's attention reads copies of a chunk's pages
    # The same, by its unfused attention, in blocks of rows.
    BLOCKS = "gathered chunks in blocks"
    RECORDED = "recorded steps"  # mx.compile builds the graph, pools and fences are arguments

    @property
    def has_copies(self) -> bool:
        return self in (StepWay.GATHERED, StepWay.BLOCKS)

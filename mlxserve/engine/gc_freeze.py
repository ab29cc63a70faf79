"""Collects the garbage of an ended engine, even if a server has frozen its objects."""

from __future__ import annotations

import gc
from typing import NamedTuple


class Frozen(NamedTuple):
    """The extent of frozen objects. A freed object leaves the count; a later freeze adds to it."""

    num_again: int  # number of times that `collect` has frozen the remaining objects
    num_objects: int  # number of frozen objects, including those frozen elsewhere


_num_again = 0


def frozen() -> Frozen:
    return Frozen(_num_again, gc.get_freeze_count())


def collect(since: Frozen) -> None:
    """Collect objects created after `since`, even if they were frozen meanwhile.

    Scanning everything that a server has frozen takes 150 ms, in which no Python thread runs.
    """
    global _num_again
    now = frozen()
    if now.num_again == since.num_again and now.num_objects <= since.num_objects:
        gc.collect()
        return
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    _num_again += 1

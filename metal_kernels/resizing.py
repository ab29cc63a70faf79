"""The common part of resizing a pool."""

from __future__ import annotations

import mlx.core as mx


def copy_start(source: mx.array, target: mx.array, count: int, axis: int = 0) -> None:
    """Copy the first `count` indices of an axis.

    This takes two updates: mlx makes an update of a whole array a view of its source, which would
    keep the source's memory.
    """
    for part in (slice(0, count // 2), slice(count // 2, count)):
        where = (*[slice(None)] * axis, part)
        target[where] = source[where]

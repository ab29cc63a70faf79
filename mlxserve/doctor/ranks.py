"""Time that the ranks of a group take to agree, and its effect on split models.

A model that is split by heads needs two sums over all ranks in each layer, whose time is added to
every step; one that is split by layers needs one message for each rank.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator

import mlx.core as mx

from mlxserve.core.errors import MlxServeError
from mlxserve.doctor.finding import Finding

_HIDDEN = 4096  # an 8B model's: the numbers of one row that a sum is over
_LAYERS = 36  # the same model's
_ROWS = (1, 512)  # a decode, and a chunk of a prompt
_REPEATS, _CHAIN = 5, 2 * _LAYERS


def time_ranks(backend: str) -> Iterator[Finding]:
    """Measure in every rank; only rank 0's findings are worth printing. Raises MlxServeError."""
    try:
        group = mx.distributed.init(strict=True, backend=backend)
    except (RuntimeError, ValueError) as error:
        raise MlxServeError(f"mx.distributed cannot start: {error}") from error
    yield Finding("ranks", str(group.size()))
    for rows in _ROWS:
        seconds = _seconds_of_sum(group, rows)
        what = "one row" if rows == 1 else f"{rows} rows"
        size = rows * _HIDDEN * 2 // 1024
        yield Finding(f"sum of {what}", f"{seconds * 1e6:.0f} us ({size} KiB in float16)")
        if rows == 1:
            added = seconds * _CHAIN * 1e3
            yield Finding(
                "split by heads",
                f"adds {added:.1f} ms to each token of a model of {_LAYERS} layers, and saves "
                f"{1 - 1 / group.size():.0%} of the time to read its weights; otherwise split by "
                "layers",
            )


def _seconds_of_sum(group: mx.distributed.Group, rows: int) -> float:
    """Median seconds of a sum in a chain as long as a model's."""
    x = mx.zeros((rows, _HIDDEN), mx.float16)
    mx.eval(mx.distributed.all_sum(x, group=group))
    times = []
    for _ in range(_REPEATS):
        began = time.perf_counter()
        y = x
        for _ in range(_CHAIN):
            y = mx.distributed.all_sum(y, group=group)
        mx.eval(y)
        times.append((time.perf_counter() - began) / _CHAIN)
    return statistics.median(times)

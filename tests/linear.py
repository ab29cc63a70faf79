"""Whether work grows with the length of a text or with its square.

Work is counted, not timed, where it is Python: by the lines that are executed. C code that it calls is
timed beside, with a floor far above what is linear.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any

from mlxserve.core.errors import MlxServeError

MAX_RATIO = 6.0  # of the work of a text and of one that is four times as long
_FEW_LINES = 1_000
_FLOOR = 0.02  # seconds of C code: linear takes a hundredth


def num_lines(run: Callable[[], object]) -> int:
    count = 0

    def trace(_frame: FrameType, _event: str, _argument: Any) -> Any:
        nonlocal count
        count += 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        with suppress(MlxServeError, ValueError):
            run()
    finally:
        sys.settrace(before)
    return count


def grows_in_lines(short: Callable[[], object], long: Callable[[], object]) -> bool:
    """Whether `long`, the same with four times as much text, executes far more than four times as many lines."""
    return num_lines(long) > max(MAX_RATIO * num_lines(short), _FEW_LINES)


def grows_in_time(
    short: Callable[[], object], long: Callable[[], object], floor: float = _FLOOR
) -> bool:
    """Whether `long` takes more than `floor` seconds of a processor, and far more than four times those of `short`."""
    if _seconds(long) <= floor:
        return False
    least = min(_seconds(long) for _ in range(4))
    return least > max(MAX_RATIO * min(_seconds(short) for _ in range(4)), floor)


def _seconds(run: Callable[[], object]) -> float:
    began = time.thread_time()
    with suppress(MlxServeError, ValueError):
        run()
    return time.thread_time() - began

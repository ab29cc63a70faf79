"""An array whose computation fails, and where a test may compute it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import mlx.core as mx

T = TypeVar("T")


def broken() -> mx.array:
    """An array [2, 2] whose computation raises "[Inverse::eval_cpu] …"."""
    return mx.linalg.inv(mx.zeros((2, 2)), stream=mx.cpu)


def in_a_thread(function: Callable[[], T]) -> T:
    """The function's result, computed outside the main thread, as an engine computes.

    In the main thread, mlx (0.32.4, `CommandEncoder::dispatch`) raises the error of a stream
    between the two halves of its count of running tasks. The count of the process is too high
    from then on, and with two too many an `async_eval` of any thread can wait for ever.
    """
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(function).result()

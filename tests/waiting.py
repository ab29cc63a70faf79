"""Waiting for what announces nothing: another process, a thread's progress, a file.

Tests sleep here and nowhere else: to look again, until a deadline that only a failure reaches.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator

_PAUSE_SECONDS = 0.01


def wait_until(
    is_so: Callable[[], object], seconds: float = 60.0, complaint: str = "it did not happen"
) -> None:
    """Raises AssertionError with the complaint when it is not so in time."""
    for _ in _looks(is_so, seconds, complaint):
        time.sleep(_PAUSE_SECONDS)


async def until(
    is_so: Callable[[], object], seconds: float = 60.0, complaint: str = "it did not happen"
) -> None:
    """`wait_until` while the event loop runs on."""
    for _ in _looks(is_so, seconds, complaint):
        await asyncio.sleep(_PAUSE_SECONDS)


def _looks(is_so: Callable[[], object], seconds: float, complaint: str) -> Iterator[None]:
    """One value for each time that it is not so yet."""
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline, complaint
        yield

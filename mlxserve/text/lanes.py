"""Lanes: threads for work on texts, so that large texts do not hold up small ones.

Parsing, rendering or encoding megabytes takes seconds, and the event loop's own threads are few. Large
texts have two threads of their own, and wait for each other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

# Characters or bytes. A coding agent's first prompt has about 150,000; encoding 256 Ki of them takes
# a tenth of a second.
LARGE = 256 << 10

_large = ThreadPoolExecutor(2, thread_name_prefix="mlxserve-large-text")


async def run_in_lane(size: int, work: Callable[[], T]) -> T:
    """Run work on a text of `size` characters or bytes on a thread, beside the event loop."""
    threads = _large if size > LARGE else None  # None: the event loop's own
    return await asyncio.get_running_loop().run_in_executor(threads, work)


def text_size(*values: object) -> int:
    """Characters of all texts in nested lists and mappings, without the names of members."""
    size = 0
    waiting = list(values)
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            size += len(value)
        elif isinstance(value, Mapping):
            waiting += value.values()
        elif isinstance(value, (list, tuple)):
            waiting += value
    return size

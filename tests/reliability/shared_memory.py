"""The memory that kinds share in engines of chosen sizes, which would divide it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlxserve.cache.groups import Window
from mlxserve.cache.kinds.full_pages import FullPages
from mlxserve.cache.kinds.state_slots import StateSlots
from mlxserve.cache.kinds.window_pages import WindowPages
from mlxserve.cache.pool_memory import PoolMemory
from mlxserve.request import STATE_SLOTS

WINDOW_BYTES, STATE_BYTES = 3, 5  # of a page in bytes, whatever the arrays have


def shared_memory(options: Mapping[str, Any], window: Window) -> PoolMemory | None:
    """Return what all kinds share in a cache of an odd number of pages; None in one of an even number.

    Beside all full pages it has room for one window and the states of one request.
    """
    if options["num_pages"] % 2 == 0:
        return None
    nbytes, page_bytes = options["num_pages"], {FullPages.name: 1}
    if "num_window_pages" in options:
        page_bytes[WindowPages.name] = WINDOW_BYTES
        nbytes += WINDOW_BYTES * window.num_held
    if "num_state_slots" in options:
        page_bytes[StateSlots.name] = STATE_BYTES
        nbytes += STATE_BYTES * STATE_SLOTS
    return PoolMemory(nbytes, page_bytes) if len(page_bytes) > 1 else None

"""First pages: the arrays that kernels bind in place of a pool.

MLX counts all elements of an array when a command buffer binds it for the first time, and ends the
command buffer beyond a limit. With K and V of one layer at the limit, every kernel that touches a
pool would end one: 73 command buffers for a step of 36 layers instead of 4. A view of the first
page shares the pool's memory from its first byte, counts as one page, and lets kernels reach all
others: they read no shape but a page's.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import mlx.core as mx

# Of the pools of this process, by their ids.
_views: dict[int, tuple[weakref.ref[mx.array], mx.array]] = {}


def first_page(pool: mx.array) -> mx.array:
    """Return a pool's view, (1, kv_heads, page_size, row), the same at each call.

    The view of a view is itself. It ends with the pool, so that a pool that was replaced by a
    larger one gives back its memory.
    """
    if pool.shape[0] == 1:
        return pool
    key = id(pool)
    known = _views.get(key)
    if known is not None:
        return known[1]

    def forget(gone: weakref.ref[mx.array]) -> None:
        if _views[key][0] is gone:
            del _views[key]

    view = pool[:1]
    _views[key] = weakref.ref(pool, forget), view
    return view


def first_pages(pools: Sequence[mx.array]) -> list[mx.array]:
    """Return `first_page` of each pool; cached ones, called before every step, cost no call."""
    views = (_views.get(id(pool)) for pool in pools)
    return [
        first_page(pool) if known is None else known[1]
        for pool, known in zip(pools, views, strict=True)
    ]

"""WindowKV: keys and values of the layers with a window, in a pool of their own beside that of the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mlxserve.cache.kv import Backends, KVPool, LayerSpec


@dataclass(frozen=True, slots=True)
class WindowKV:
    """The pool of the layers with a window.

    places: for each layer of the model, True if it is in this pool, and its index in its pool
    """

    kv: KVPool
    places: tuple[tuple[bool, int], ...]


def pools_of(
    layers: Sequence[LayerSpec],
    backends: Backends,
    page_size: int,
    num_pages: tuple[int, int],
    num_backed: tuple[int | None, int | None],
) -> tuple[KVPool, WindowKV]:
    """Return the pools of the layers that see everything, and of those with a window.

    num_pages, num_backed: arguments of both pools' `KVPool`. Raises OutOfMemory.
    """
    each = backends if isinstance(backends, Sequence) else (backends,) * len(layers)
    is_windowed = [spec.window is not None for spec in layers]
    places, pools = [], []
    for index, windowed in enumerate(is_windowed):
        places.append((windowed, is_windowed[:index].count(windowed)))
    for windowed in (False, True):
        own = [index for index, (other, _) in enumerate(places) if other == windowed]
        pools.append(
            KVPool(
                [layers[index] for index in own],
                num_pages[windowed],
                page_size,
                [each[index] for index in own],
                num_backed[windowed],
            )
        )
    return pools[0], WindowKV(pools[1], tuple(places))

"""WindowKV: keys and values of the layers with a window, in a pool of their own beside that of the others.

StepPools: both pools, or the only one, as the layers of one step use them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import mlx.core as mx

from metal_kernels.ops import Backend
from mlxserve.cache.kv import Backends, KVPool, LayerSpec
from mlxserve.cache.layer_kv import LayerKV
from mlxserve.cache.layout import StepLayout


@dataclass(frozen=True, slots=True)
class WindowKV:
    """The pool of the layers with a window.

    places: for each layer of the model, True if it is in this pool, and its index in its pool
    """

    kv: KVPool
    places: tuple[tuple[bool, int], ...]


@dataclass(frozen=True, slots=True)
class StepPools:
    """The pools of all layers, that of the layers with a window last."""

    kv: KVPool
    windows: WindowKV | None = None

    @property
    def each(self) -> tuple[KVPool, ...]:
        return (self.kv,) if self.windows is None else (self.kv, self.windows.kv)

    def layer(self, index: int, layout: StepLayout) -> LayerKV:
        """Return the cache of the model's layer `index` for a step."""
        if self.windows is None:
            return LayerKV(self.kv, index, layout)
        has_window, place = self.windows.places[index]
        if not has_window:
            return LayerKV(self.kv, place, layout)
        assert layout.windows is not None, "the step has page tables for windows"
        return LayerKV(self.windows.kv, place, layout.windows)

    def keys_of(self, arrays: Sequence[Sequence[mx.array]]) -> list[mx.array]:
        """Return the keys among the arrays of each pool, pool by pool."""
        pools = zip(self.each, arrays, strict=True)
        return [keys for pool, own in pools for keys in own[: len(pool.specs)]]

    def with_arrays(self, arrays: Sequence[Sequence[mx.array]], backend: Backend) -> StepPools:
        """Return pools of the same layers over other arrays, pool by pool, for one step."""
        kv, *windows = (
            pool.with_arrays(own, backend) for pool, own in zip(self.each, arrays, strict=True)
        )
        if self.windows is None:
            return StepPools(kv)
        return StepPools(kv, replace(self.windows, kv=windows[0]))


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

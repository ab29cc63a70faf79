"""A pool of two small layers, and what is written to it."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from metal_kernels.choice import select_backend
from metal_kernels.tables import SequenceTables
from mlxserve.cache.kv import KVPool, LayerSpec
from mlxserve.cache.layout import StepLayout

SPECS = (
    LayerSpec(kv_heads=2, key_dim=8, value_dim=8, dtype=mx.float32),
    LayerSpec(kv_heads=1, key_dim=8, value_dim=4, dtype=mx.float32, window=3),
)


def tables(page_table: list[int], context: int, rows: int) -> SequenceTables:
    return SequenceTables(
        np.array([page_table], np.int32),
        np.array([context], np.int32),
        np.array([0, rows], np.int32),
        16,
    )


def pool_with_history() -> KVPool:
    """4 pages of 16, and 17 tokens of the decode's sequence in pages 2 and 0."""
    kv = KVPool(SPECS, num_pages=4, page_size=16, backends=select_backend("cpu"))
    slots = np.array([*range(32, 48), 0], np.int32)
    step = StepLayout(mx.arange(17), slots, 0, None, tables([2, 0], 17, 17))
    for index, spec in enumerate(SPECS):
        kv.write(index, *rows(17, spec, seed=index), step)
    return kv


def rows(count: int, spec: LayerSpec, seed: int) -> tuple[mx.array, mx.array]:
    keys, values = mx.random.split(mx.random.key(seed))
    return (
        mx.random.normal((count, spec.kv_heads, spec.key_dim), key=keys),
        mx.random.normal((count, spec.kv_heads, spec.value_dim), key=values),
    )

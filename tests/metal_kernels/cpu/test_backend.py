"""What the CPU backend costs: memory that grows with the pages touched, not with the pool."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from metal_kernels.cpu.backend import CpuBackend

_PAGES, _HEADS, _PAGE_SIZE, _DIM = 4_096, 2, 16, 32


def test_copying_pages_does_not_copy_the_pool() -> None:
    backend = CpuBackend()
    keys, values = (
        backend.new_pool(_PAGES, _HEADS, _PAGE_SIZE, _DIM, mx.float32) for _ in range(2)
    )
    mx.eval(keys, values)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    sources, targets = np.array([1, 2], np.int32), np.array([9, 10], np.int32)
    # Handed over, not lent: a second reference would force mlx to copy.
    pools = [keys, values]
    del keys, values
    pools = list(backend.copy_pages(pools.pop(0), pools.pop(0), sources, targets, _PAGE_SIZE))
    mx.eval(pools)
    assert mx.get_peak_memory() - before < pools[0].nbytes // 8

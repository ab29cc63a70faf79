"""What plain mlx's backends cost beside what they compute."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from metal_kernels.plain import PlainBackend

_PAGES, _HEADS, _PAGE_SIZE, _DIM = 4_096, 2, 16, 32


def test_copying_pages_does_not_copy_the_pool() -> None:
    plain = PlainBackend()
    keys, values = (plain.new_pool(_PAGES, _HEADS, _PAGE_SIZE, _DIM, mx.float32) for _ in range(2))
    mx.eval(keys, values)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    sources, targets = np.array([1, 2], np.int32), np.array([9, 10], np.int32)
    # Handed over, not lent: a second reference would force mlx to copy.
    pools = [keys, values]
    del keys, values
    pools = list(plain.copy_pages(pools.pop(0), pools.pop(0), sources, targets, _PAGE_SIZE))
    mx.eval(pools)
    assert mx.get_peak_memory() - before < pools[0].nbytes // 8

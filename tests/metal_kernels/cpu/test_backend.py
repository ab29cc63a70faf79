"""What the CPU backend costs, and that its ways to attend agree."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from metal_kernels.cpu.backend import CpuBackend
from metal_kernels.tables import SequenceTables

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


def test_decodes_attended_together_get_what_each_gets_alone() -> None:
    """Few scores, which mlx's kernel takes, and many, which are written out."""
    draw = np.random.default_rng(0)
    shape = (_HEADS, 128 * _PAGE_SIZE, _DIM)
    keys, values = (mx.array(draw.normal(size=shape).astype(np.float32)) for _ in range(2))
    for contexts in ([3, 20, 9], [300, 150, 16, 77]):
        num_rows, num_pages = len(contexts), -(-max(contexts) // _PAGE_SIZE)
        pages = draw.permutation(128)[: num_rows * num_pages].reshape(num_rows, num_pages)
        tables = SequenceTables(
            page_tables=pages.astype(np.int32),
            context_lens=np.array(contexts, np.int32),
            query_starts=np.arange(num_rows + 1, dtype=np.int32),
            page_size=_PAGE_SIZE,
        )
        queries = mx.array(draw.normal(size=(num_rows, 6, _DIM)).astype(np.float32))
        together, alone = (
            CpuBackend(max_gathered_rows=rows).paged_decode(
                queries, keys, values, tables, scale=0.2
            )
            for rows in (1 << 14, 0)
        )
        assert np.abs(np.array(together) - np.array(alone)).max() < 2e-6

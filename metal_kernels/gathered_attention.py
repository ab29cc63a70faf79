"""GatheredAttention: MLX's own attention, fused or in blocks, over copies of a chunk's pages.

MLX's kernels know no fence and no page, so they cannot read a pool. `gather_pages` binds the fence and
writes what is seen of the pages side by side to arrays of its own, which MLX orders like any others.
Their room is rounded (`limits.room_for`); MLX's attention reads a view by its strides, and nothing
behind it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import mlx.core as mx

from metal_kernels import kernels, quantised
from metal_kernels.fences import Fences
from metal_kernels.kernels import FENCE, Dispatch, Kernels
from metal_kernels.long_chunks import Gathered, fused_attention
from metal_kernels.ops import Attention
from metal_kernels.tables import SequenceTables
from metal_kernels.unfused_attention import attention_in_blocks

_THREADS = 256


class GatheredAttention:
    """Attention of one backend over gathered pages."""

    def __init__(self, kernels: Kernels, fences: Fences) -> None:
        self._kernels = kernels
        self._fences = fences

    def attend(
        self,
        queries: mx.array,
        k_pool: mx.array,
        v_pool: mx.array,
        tables: SequenceTables,
        gathered: Gathered,
        attention: Attention,
        sinks: mx.array | None,
    ) -> mx.array:
        """Attend one chunk, which `tables` describe and `gathered` is made of.

        Returns the shape of queries: (rows, heads, head_dim) or (rows, heads, 1, head_dim).
        """
        gather = tables.plan(
            ("gather", id(gathered)),  # the plans keep `gathered` as long
            lambda: self._plan(k_pool, queries.dtype, gathered),
        )
        after = self._fences.before_read(k_pool)
        keys, values, fence = gather(k_pool=k_pool, v_pool=v_pool, after=after)
        self._fences.after_read(k_pool, fence)
        is_of_model = queries.ndim == 4
        rows = queries if is_of_model else queries[:, :, None]
        attend: Callable[..., mx.array] = fused_attention
        if gathered.block_bytes:
            attend = partial(
                attention_in_blocks, window=attention.window, block_bytes=gathered.block_bytes
            )
        out = attend(
            rows.swapaxes(0, 2),
            keys[:, :, : gathered.num_seen],
            values[:, :, : gathered.num_seen],
            scale=attention.scale,
            mask=gathered.mask,
            sinks=sinks,
        ).swapaxes(0, 2)
        return out if is_of_model else out.squeeze(2)

    def _plan(self, k_pool: mx.array, dtype: mx.Dtype, gathered: Gathered) -> Dispatch:
        kv_heads = k_pool.shape[1]
        head_dim = quantised.head_dim_of(k_pool.shape[-1], k_pool.dtype)
        copies = (1, kv_heads, gathered.room, head_dim), dtype
        return self._kernels.dispatch(
            kernels.GATHER_PAGES,
            {"pages": gathered.pages},
            {"keys": copies, "values": copies, "fence": FENCE},
            [
                ("T", dtype),
                ("D", head_dim),
                ("IS_QUANTISED", int(k_pool.dtype == quantised.DTYPE)),
            ],
            (_THREADS, kv_heads, gathered.num_pages),
            (_THREADS, 1, 1),
        )

"""The specification of the ops, in plain mlx and float32; the `cpu` backend is the fast one.

A pool is (num_pages, kv_heads, page_size, head_dim).
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from metal_kernels import rotary
from metal_kernels.ops import (
    Attention,
    Heads,
    Norms,
    Projected,
    Slots,
    check_attention,
    check_copy,
    check_decode,
    check_gather,
    check_latent,
    check_write,
)
from metal_kernels.quantised import loaded, row_width, stored
from metal_kernels.reading import evaluate
from metal_kernels.tables import Plans, SequenceTables


class ReferenceBackend:
    name = "reference"
    writes_in_place = False
    takes_model_rows = False

    def new_pool(
        self, num_pages: int, kv_heads: int, page_size: int, head_dim: int, dtype: mx.Dtype
    ) -> mx.array:
        return mx.zeros((num_pages, kv_heads, page_size, row_width(head_dim, dtype)), dtype)

    def write_kv(
        self,
        keys: mx.array,
        values: mx.array,
        k_pool: mx.array,
        v_pool: mx.array,
        slots: Slots,
        plans: Plans | None = None,  # noqa: ARG002
    ) -> tuple[mx.array, mx.array]:
        check_write(keys, values, k_pool, v_pool, slots)
        k_pool[_at(slots, k_pool)] = stored(keys, k_pool)
        v_pool[_at(slots, v_pool)] = stored(values, v_pool)
        return k_pool, v_pool

    def rotate_and_write(
        self,
        projected: Projected,
        turns: mx.array,
        heads: Heads,
        norms: Norms,
        pools: tuple[mx.array, mx.array],
        slots: Slots,
        plans: Plans | None = None,
    ) -> tuple[mx.array, tuple[mx.array, mx.array]]:
        return rotary.rotate_and_write(self, projected, turns, heads, norms, pools, slots, plans)

    def read_kv(
        self, k_pool: mx.array, v_pool: mx.array, slots: Slots
    ) -> tuple[mx.array, mx.array]:
        keys, values = k_pool[_at(slots, k_pool)], v_pool[_at(slots, v_pool)]
        mx.eval(keys, values)
        return keys, values

    def settle(self, *pools: mx.array) -> None:
        evaluate(*pools)

    def gather_kv(
        self, k_pool: mx.array, v_pool: mx.array, tables: SequenceTables
    ) -> tuple[mx.array, mx.array]:
        check_gather(tables)
        at = _at(tables.slots(0, np.arange(int(tables.context_lens[0]))), k_pool)
        keys, values = (
            loaded(pool[at], mx.float32).swapaxes(0, 1)[None] for pool in (k_pool, v_pool)
        )
        return keys, values

    def copy_pages(
        self, k_pool: mx.array, v_pool: mx.array, sources: Slots, targets: Slots, page_size: int
    ) -> tuple[mx.array, mx.array]:
        check_copy(k_pool, v_pool, sources, targets, page_size)
        for pool in (k_pool, v_pool):
            pool[mx.array(targets)] = pool[mx.array(sources)]
        return k_pool, v_pool

    def resize_pool(self, pool: mx.array, num_pages: int, page_size: int) -> mx.array:
        assert page_size == pool.shape[2], "the pool has pages of another size"
        count = min(num_pages, len(pool))
        resized = mx.zeros((num_pages, *pool.shape[1:]), pool.dtype)
        resized[:count] = pool[:count]
        mx.eval(resized)
        return resized

    def paged_decode(
        self,
        queries: mx.array,
        k_pool: mx.array,
        v_pool: mx.array,
        tables: SequenceTables,
        attention: Attention,
        sinks: mx.array | None = None,
    ) -> mx.array:
        check_decode(tables)
        return self.paged_prefill(queries, k_pool, v_pool, tables, attention, sinks)

    def paged_prefill(
        self,
        queries: mx.array,
        k_pool: mx.array,
        v_pool: mx.array,
        tables: SequenceTables,
        attention: Attention,
        sinks: mx.array | None = None,
    ) -> mx.array:
        check_attention(queries, k_pool, v_pool, tables, attention, sinks)
        scale, window, softcap = attention
        group = queries.shape[1] // k_pool.shape[1]  # query heads of a kv head
        outputs = []
        for sequence, first, end in tables.queries():
            context = int(tables.context_lens[sequence])
            row = np.arange(context - (end - first), context)[:, None]
            position = np.arange(max(0, row.min() + 1 - (window or context)), context)
            last = row if tables.ends is None else tables.ends[first:end, None] - 1
            is_seen = (position <= last) & (position > row - (window or context))
            at = _at(tables.slots(sequence, position), k_pool)
            keys, values = (
                mx.repeat(loaded(pool[at], mx.float32).astype(mx.float32), group, axis=1)
                for pool in (k_pool, v_pool)
            )
            scores = mx.einsum("rhd,phd->hrp", queries[first:end].astype(mx.float32), keys) * scale
            if softcap is not None:
                scores = softcap * mx.tanh(scores / softcap)
            scores = mx.where(mx.array(is_seen), scores, -mx.inf)
            total = mx.logsumexp(scores, axis=-1, keepdims=True)
            # Part of the sum, without a value.
            if sinks is not None:
                total = mx.logaddexp(total, sinks.astype(mx.float32)[:, None, None])
            outputs.append(mx.einsum("hrp,phd->rhd", mx.exp(scores - total), values))
        return mx.concatenate(outputs).astype(queries.dtype)

    def paged_latent(
        self,
        q_latent: mx.array,
        q_rope: mx.array,
        k_pool: mx.array,
        v_pool: mx.array,
        tables: SequenceTables,
        *,
        scale: float,
    ) -> mx.array:
        check_latent(q_latent, q_rope, k_pool, v_pool, tables)
        outputs = []
        for sequence, first, end in tables.queries():
            context = int(tables.context_lens[sequence])
            row, position = np.arange(context - (end - first), context), np.arange(context)
            at = _at(tables.slots(sequence, position), k_pool)
            latents, keys = (pool[at][:, 0].astype(mx.float32) for pool in (k_pool, v_pool))
            scores = (
                mx.einsum("rhd,pd->hrp", q_latent[first:end].astype(mx.float32), latents) * scale
            )
            scores += mx.einsum("rhd,pd->hrp", q_rope[first:end].astype(mx.float32), keys)
            scores = mx.where(mx.array(position <= row[:, None]), scores, -mx.inf)
            weights = mx.softmax(scores, axis=-1)
            outputs.append(mx.einsum("hrp,pd->rhd", weights, latents))
        return mx.concatenate(outputs).astype(q_latent.dtype)


def _at(slots: Slots, pool: mx.array) -> tuple[mx.array, slice, mx.array]:
    """Index of a pool that gives (slots, kv_heads, head_dim)."""
    return mx.array(slots // pool.shape[2]), slice(None), mx.array(slots % pool.shape[2])

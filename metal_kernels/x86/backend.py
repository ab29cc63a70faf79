"""X86Backend: the ops in plain mlx, with attention in float32 written out for the speed of a Linux CPU."""

from __future__ import annotations

import mlx.core as mx

from metal_kernels.ops import Attention, check_attention, check_decode, shapes_of
from metal_kernels.plain import PlainBackend
from metal_kernels.tables import IntArray, SequenceTables
from metal_kernels.x86.decodes import COPIED_PER_PRODUCT, Decodes
from metal_kernels.x86.written_out import attend_latents_written_out, attend_written_out


class X86Backend(PlainBackend):
    """The CPU backend: weights are float32, except models that only fit in half precision.

    mlx attends in those.
    """

    def __init__(self, copied_per_product: int = COPIED_PER_PRODUCT) -> None:
        """`copied_per_product`: as in `Decodes.from_tables`."""
        self._copied_per_product = copied_per_product

    def paged_decode(
        self,
        queries: mx.array,
        k_pool: mx.array,
        v_pool: mx.array,
        tables: SequenceTables,
        attention: Attention,
        sinks: mx.array | None = None,
    ) -> mx.array:
        if queries.dtype != mx.float32:
            return super().paged_decode(queries, k_pool, v_pool, tables, attention, sinks)

        def plan() -> Decodes:
            check_decode(tables)
            check_attention(queries, k_pool, v_pool, tables, attention, sinks)
            return Decodes.from_tables(tables, attention.window, k_pool, self._copied_per_product)

        key = ("decodes", attention, shapes_of(queries, k_pool, v_pool, sinks))
        return tables.plan(key, plan).attend(queries, k_pool, v_pool, attention, sinks)

    def _attend(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        attention: Attention,
        sinks: mx.array | None,
        ends: IntArray | None,
    ) -> mx.array:
        if queries.dtype != mx.float32:
            return super()._attend(queries, keys, values, attention, sinks, ends)
        return attend_written_out(queries, keys, values, attention, sinks, ends)

    def _attend_latents(
        self,
        q_latent: mx.array,
        q_rope: mx.array,
        latents: mx.array,
        keys: mx.array,
        *,
        scale: float,
    ) -> mx.array:
        if q_latent.dtype != mx.float32:
            return super()._attend_latents(q_latent, q_rope, latents, keys, scale=scale)
        return attend_latents_written_out(q_latent, q_rope, latents, keys, scale=scale)

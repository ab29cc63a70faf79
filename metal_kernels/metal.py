"""MetalBackend: the ops as Metal kernels over pools that are written in place.

Owns the order of kernels (`fences.py`) and knows their texts only by their buffers (`kernels.py`).
Pools are (num_pages, kv_heads, page_size, head_dim): a page's tile of one head is contiguous.

In-place writes are correct under these rules; breaking one corrupts data silently:
a kernel that uses a pool binds the fences of the kernels it must follow; a pool is one
row-contiguous array, passed whole and never replaced; nothing here runs inside mx.compile; no other
op of mlx reads a pool while a step is running (call `settle()` first).
"""

from __future__ import annotations

import math

import mlx.core as mx
import numpy as np

from metal_kernels import kernels
from metal_kernels.fences import Fences
from metal_kernels.kernels import Factory, Kernels, KernelSpec
from metal_kernels.ops import (
    HEAD_DIMS,
    PAGE_SIZES,
    Slots,
    check_attention,
    check_copy,
    check_decode,
    check_write,
)
from metal_kernels.plans import DecodePlan, HeadSplit, PrefillPlan, WritePlan, tile_side, upload
from metal_kernels.resizing import copy_start
from metal_kernels.tables import SequenceTables

DTYPES = (mx.float16, mx.bfloat16, mx.float32)
_LOG2_E = math.log2(math.e)
_FENCE = ((8,), mx.int32)
_COPY_THREADS = 256
_TURNS = 4  # simdgroups that take turns at the keys of a partition


class MetalBackend:
    """The ops as kernels that `factory` makes."""

    name = "metal"
    writes_in_place = True

    def __init__(self, factory: Factory) -> None:
        self._run = Kernels(factory)
        self._fences = Fences()
        self._numbers: dict[tuple[float, float | None, bool], mx.array] = {}
        self._no_sinks: dict[tuple[int, mx.Dtype], mx.array] = {}
        self._write_plan: tuple[Slots, int, WritePlan] | None = None  # of the step's slots

    def new_pool(
        self, num_pages: int, kv_heads: int, page_size: int, head_dim: int, dtype: mx.Dtype
    ) -> mx.array:
        """Raises ValueError for shapes and dtypes that the kernels do not support."""
        if (reason := refusal(head_dim, head_dim, dtype)) is not None:
            raise ValueError(reason)
        if page_size not in PAGE_SIZES:
            raise ValueError(f"pages have {PAGE_SIZES} slots, got {page_size}")
        return self._added(mx.zeros((num_pages, kv_heads, page_size, head_dim), dtype))

    def _added(self, pool: mx.array) -> mx.array:
        mx.eval(pool)
        # mlx passes a copy of any other array to a kernel, and writes to the copy would be lost.
        assert memoryview(pool).c_contiguous  # type: ignore[arg-type]  # mlx does not say so
        self._fences.add(pool)
        return pool

    def resize_pool(
        self, pool: mx.array, num_pages: int, page_size: int, sources: Slots, targets: Slots
    ) -> mx.array:
        check_copy(pool, pool, sources, targets, page_size)
        self.settle()
        resized = mx.zeros((num_pages, *pool.shape[1:]), pool.dtype)
        copy_start(pool, resized, min(num_pages, pool.shape[0]))
        if len(sources):
            resized[mx.array(targets)] = pool[mx.array(sources)]
        return self._added(resized)

    def settle(self) -> None:
        """Wait for all writes to all pools."""
        mx.eval(self._fences.pending())

    def write_kv(
        self, keys: mx.array, values: mx.array, k_pool: mx.array, v_pool: mx.array, slots: Slots
    ) -> tuple[mx.array, mx.array]:
        check_write(keys, values, k_pool, v_pool, slots)
        _check_pools(k_pool, v_pool)
        plan = self._plan_of(slots, k_pool.shape[2])
        rows = {"keys": keys, "values": values}
        if len(plan.pages):
            self._move(
                kernels.WRITE_KV_PAGES, rows, plan.pages_on_device, len(plan.pages), k_pool, v_pool
            )
        if len(plan.tokens):
            self._move(
                kernels.WRITE_KV_TOKENS,
                rows,
                plan.tokens_on_device,
                len(plan.tokens),
                k_pool,
                v_pool,
            )
        return k_pool, v_pool

    def read_kv(
        self, k_pool: mx.array, v_pool: mx.array, slots: Slots
    ) -> tuple[mx.array, mx.array]:
        _check_pools(k_pool, v_pool)
        self.settle()
        pages, offsets = mx.array(slots // k_pool.shape[2]), mx.array(slots % k_pool.shape[2])
        keys, values = k_pool[pages, :, offsets], v_pool[pages, :, offsets]
        mx.eval(keys, values)
        return keys, values

    def copy_pages(
        self,
        k_pool: mx.array,
        v_pool: mx.array,
        sources: Slots,
        targets: Slots,
        page_size: int,
    ) -> tuple[mx.array, mx.array]:
        check_copy(k_pool, v_pool, sources, targets, page_size)
        _check_pools(k_pool, v_pool)
        if page_size != k_pool.shape[2]:
            raise ValueError(f"pages of this pool have {k_pool.shape[2]} slots, not {page_size}")
        if len(sources):
            moves = upload(np.stack([sources, targets], axis=1))
            self._move(kernels.COPY_PAGES, {}, moves, len(sources), k_pool, v_pool)
        return k_pool, v_pool

    def paged_decode(
        self,
        queries: mx.array,
        k_pool: mx.array,
        v_pool: mx.array,
        tables: SequenceTables,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: mx.array | None = None,
    ) -> mx.array:
        check_attention(queries, k_pool, v_pool, tables, window, softcap, sinks)
        _check_pools(k_pool, v_pool)
        check_decode(tables)
        sequences, heads, head_dim = queries.shape
        kv_heads = k_pool.shape[1]
        split = HeadSplit.of(heads // kv_heads, head_dim)
        plan = tables.plan(("decode", window), lambda: DecodePlan.of(tables, window))
        numbers = self._numbers_of(scale, softcap, sinks is not None)
        threads = 32 * _TURNS * split.parts
        partials, fence = self._run(
            kernels.PAGED_DECODE,
            {
                "queries": queries,
                "k_pool": k_pool,
                "v_pool": v_pool,
                "page_tables": _page_tables(tables),
                "partitions": plan.partitions,
                "numbers": numbers,
                "after": self._fences.before_read(k_pool),
            },
            {
                "partials": ((plan.num_partitions, heads, head_dim + 4), mx.float32),
                "fence": _FENCE,
            },
            [
                ("T", queries.dtype),
                ("D", head_dim),
                ("GROUP", heads // kv_heads),
                ("HEADS", split.heads),
                ("PARTS", split.parts),
                ("BLOCKS", split.blocks),
            ],
            (threads, kv_heads * split.blocks, plan.num_partitions),
            (threads, 1, 1),
        )
        self._fences.after_read(k_pool, fence)
        (out,) = self._run(
            kernels.MERGE_PARTITIONS,
            {
                "partials": partials,
                "starts": plan.starts,
                "sinks": self._sinks_of(sinks, heads, queries.dtype),
                "numbers": numbers,
            },
            {"out": ((sequences, heads, head_dim), queries.dtype)},
            [("T", queries.dtype), ("D", head_dim)],
            (32, heads, sequences),
            (32, 1, 1),
        )
        return out

    def paged_prefill(
        self,
        queries: mx.array,
        k_pool: mx.array,
        v_pool: mx.array,
        tables: SequenceTables,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: mx.array | None = None,
    ) -> mx.array:
        check_attention(queries, k_pool, v_pool, tables, window, softcap, sinks)
        _check_pools(k_pool, v_pool)
        rows, heads, head_dim = queries.shape
        kv_heads = k_pool.shape[1]
        group = heads // kv_heads
        side = tile_side(head_dim, queries.dtype.size)
        plan = tables.plan(
            ("prefill", window, group, side), lambda: PrefillPlan.of(tables, window, group, side)
        )
        out, fence = self._run(
            kernels.PAGED_PREFILL,
            {
                "queries": queries,
                "k_pool": k_pool,
                "v_pool": v_pool,
                "page_tables": _page_tables(tables),
                "tiles": plan.tiles,
                "numbers": self._numbers_of(scale, softcap, sinks is not None),
                "sinks": self._sinks_of(sinks, heads, queries.dtype),
                "after": self._fences.before_read(k_pool),
            },
            {"out": ((rows, heads, head_dim), queries.dtype), "fence": _FENCE},
            [("T", queries.dtype), ("D", head_dim), ("SIDE", side)],
            (4 * side, kv_heads, plan.num_tiles),
            (4 * side, 1, 1),
        )
        self._fences.after_read(k_pool, fence)
        return out

    def _move(
        self,
        spec: KernelSpec,
        rows: dict[str, mx.array],
        moves: mx.array,
        count: int,
        k_pool: mx.array,
        v_pool: mx.array,
    ) -> None:
        """Run a kernel that writes the pools: `count` moves of every kv head."""
        _, kv_heads, _, head_dim = k_pool.shape
        after_a, after_b = self._fences.before_write(k_pool)
        threads = _COPY_THREADS
        threadgroup = (threads, 1, 1)
        if spec is kernels.WRITE_KV_TOKENS:
            threads = head_dim * k_pool.dtype.size // 16
            threadgroup = (threads, min(kv_heads, max(1, _COPY_THREADS // threads)), 1)
        (fence,) = self._run(
            spec,
            {
                **rows,
                "moves": moves,
                "k_pool": k_pool,
                "v_pool": v_pool,
                "after_a": after_a,
                "after_b": after_b,
            },
            {"fence": _FENCE},
            [("T", k_pool.dtype), ("D", head_dim)],
            (threads, kv_heads, count),
            threadgroup,
        )
        self._fences.after_write(k_pool, fence)

    def _plan_of(self, slots: Slots, page_size: int) -> WritePlan:
        """Planned once per step: every layer passes the same array of slots."""
        if self._write_plan is not None:
            known, size, plan = self._write_plan
            if known is slots and size == page_size:
                return plan
        plan = WritePlan.of(slots, page_size)
        self._write_plan = (slots, page_size, plan)
        return plan

    def _numbers_of(self, scale: float, softcap: float | None, has_sinks: bool) -> mx.array:
        """The kernels' floats. Weights are powers of two, so log2(e) goes into scores and sinks."""
        key = (scale, softcap, has_sinks)
        if key not in self._numbers:
            factor = scale * _LOG2_E if softcap is None else scale / softcap
            cap = 0.0 if softcap is None else softcap * _LOG2_E
            self._numbers[key] = upload([factor, cap, float(has_sinks), 0, 0, 0, 0, 0], np.float32)
        return self._numbers[key]

    def _sinks_of(self, sinks: mx.array | None, heads: int, dtype: mx.Dtype) -> mx.array:
        if sinks is None:
            key = (heads, dtype)
            if key not in self._no_sinks:
                self._no_sinks[key] = mx.zeros(max(8, heads), dtype)
            return self._no_sinks[key]
        return sinks if heads >= 8 else mx.pad(sinks, (0, 8 - heads))


def refusal(key_dim: int, value_dim: int, dtype: mx.Dtype) -> str | None:
    """Why the kernels cannot run a layer of this shape, or None."""
    if key_dim != value_dim:
        return (
            f"the Metal kernels take keys and values of one head dimension, got {key_dim} and "
            f'{value_dim}; attention_backend="cpu" takes any'
        )
    if key_dim not in HEAD_DIMS:
        return (
            f"the Metal kernels take head dimensions {HEAD_DIMS}, got {key_dim}; "
            'attention_backend="cpu" takes any'
        )
    if dtype not in DTYPES:
        return f"the Metal kernels take float16, bfloat16 and float32, got {dtype}"
    return None


def _check_pools(k_pool: mx.array, v_pool: mx.array) -> None:
    if (reason := refusal(k_pool.shape[-1], v_pool.shape[-1], k_pool.dtype)) is not None:
        raise ValueError(reason)
    if k_pool.shape != v_pool.shape or k_pool.dtype != v_pool.dtype:
        raise ValueError("the pools of keys and of values must be alike")


def _page_tables(tables: SequenceTables) -> mx.array:
    return tables.plan(("page_tables",), lambda: upload(tables.page_tables))

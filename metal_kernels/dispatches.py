"""Dispatches: kernels with all arguments that the layers of a step share.

Each is made once per step for the layers of a shape, except those over latents. The arguments have
been checked.
"""

from __future__ import annotations

import math

import mlx.core as mx
import numpy as np

from metal_kernels import cooperative_tiles, kernels, quantised
from metal_kernels.draft_units import (
    GROUPED_KEYS,
    KEYS,
    UnitSplit,
    rows_of_large_groups,
    rows_together,
    uploaded_units,
)
from metal_kernels.kernels import FENCE, SMALLEST_INPUT, Dispatch, Kernels, KernelSpec
from metal_kernels.ops import Attention
from metal_kernels.plans import (
    DecodePlan,
    GroupSplit,
    HeadSplit,
    PrefillPlan,
    dim_split,
    is_large_group,
    num_tiles,
    page_tables,
    partition_size,
    tile_side,
    upload,
)
from metal_kernels.tables import SequenceTables

_LOG2_E = math.log2(math.e)
_COPY_THREADS = 256
MERGE_THREADS = 128


class Dispatches:
    """The dispatches of one backend's kernels."""

    def __init__(
        self, kernels: Kernels, *, uses_matrices: bool = True, joins_drafts: bool = True
    ) -> None:
        """uses_matrices: for decodes of large groups; joins_drafts: rows of a draft as units."""
        self._kernels = kernels
        self._joins_drafts = joins_drafts
        self._uses_matrices = uses_matrices
        self._numbers: dict[tuple[float, float | None, bool], mx.array] = {}
        self._no_sinks: dict[tuple[int, mx.Dtype], mx.array] = {}

    def decode(
        self,
        queries: mx.array,
        k_pool: mx.array,
        tables: SequenceTables,
        attention: Attention,
        sinks: mx.array | None,
    ) -> tuple[Dispatch, Dispatch]:
        """Dispatch the partitions of each sequence, and their merge."""
        sequences, heads, *_, head_dim = queries.shape
        kv_heads = k_pool.shape[1]
        group, is_quantised = heads // kv_heads, k_pool.dtype == quantised.DTYPE
        spec = kernels.PAGED_DECODE
        split: HeadSplit | GroupSplit = HeadSplit.of(group, head_dim)
        if self._uses_matrices and is_large_group(group, is_quantised=is_quantised):
            spec, split = kernels.GROUPED_DECODE, GroupSplit.of(group, head_dim)
        window, size = attention.window, partition_size(kv_heads)
        partitions, starts = tables.upload(
            ("partitions", window, size),
            lambda tables: DecodePlan.from_tables(tables, window, size).arrays,
        )
        num_partitions = partitions.shape[0]
        numbers = self._numbers_of(attention, sinks is not None)
        fixed = {
            "page_tables": uploaded_pages(tables),
            "partitions": partitions,
            "numbers": numbers,
        }
        outputs = {
            "partials": ((num_partitions, heads, head_dim + 4), mx.float32),
            "fence": FENCE,
        }
        template: list[tuple[str, int | mx.Dtype]] = [
            ("T", queries.dtype),
            ("D", head_dim),
            ("GROUP", group),
        ]
        is_last = ("IS_QUANTISED", int(is_quantised))
        units = self._units(spec, tables, window, size, group, head_dim)
        if units is not None:
            num_units, rows = units.shape
            joined: HeadSplit | GroupSplit | UnitSplit = split
            blocks = 1
            template.append(("ROWS", rows))
            if isinstance(split, HeadSplit):
                joined = UnitSplit.of(group, head_dim, rows)
                template += [("HEADS", joined.heads), ("PARTS", joined.parts)]
            else:
                blocks = split.blocks
                template += [("PARTS", split.parts), ("BLOCKS", blocks)]
            attend = self._kernels.dispatch(
                kernels.DRAFT_DECODE if isinstance(split, HeadSplit) else kernels.GROUPED_DRAFTS,
                {**fixed, "units": units},
                outputs,
                [*template, is_last],
                (joined.threads, kv_heads * blocks, num_units),
                (joined.threads, 1, 1),
            )
        else:
            if isinstance(split, HeadSplit):
                template.append(("HEADS", split.heads))
            attend = self._kernels.dispatch(
                spec,
                fixed,
                outputs,
                [*template, ("PARTS", split.parts), ("BLOCKS", split.blocks), is_last],
                (split.threads, kv_heads * split.blocks, num_partitions),
                (split.threads, 1, 1),
            )
        merge = self._kernels.dispatch(
            kernels.MERGE_PARTITIONS,
            {
                "starts": starts,
                "numbers": numbers,
                **self._without_sinks(sinks, heads, queries.dtype),
            },
            {"out": (queries.shape, queries.dtype)},
            [("T", queries.dtype), ("D", head_dim)],
            (MERGE_THREADS, heads, sequences),
            (MERGE_THREADS, 1, 1),
        )
        return attend, merge

    def _units(
        self,
        spec: KernelSpec,
        tables: SequenceTables,
        window: int | None,
        size: int,
        group: int,
        head_dim: int,
    ) -> mx.array | None:
        """Return the units of rows of drafts; None if no rows are read together."""
        if not self._joins_drafts:
            return None
        is_large = spec is kernels.GROUPED_DECODE
        most = rows_of_large_groups(head_dim) if is_large else rows_together(group, head_dim)
        if most < 2:
            return None
        keys = GROUPED_KEYS if is_large else KEYS
        units = uploaded_units(tables, window, size, most, keys)
        return units if units.shape[1] > 1 else None

    def prefill(
        self,
        queries: mx.array,
        k_pool: mx.array,
        tables: SequenceTables,
        attention: Attention,
        sinks: mx.array | None,
        *,
        is_cooperative: bool = False,
    ) -> Dispatch:
        """Dispatch the tiles of each chunk.

        is_cooperative: by the kernel of cooperative tensors
        """
        _, heads, *_, head_dim = queries.shape
        kv_heads = k_pool.shape[1]
        group = heads // kv_heads
        spec, of_tiles = kernels.COOPERATIVE_PREFILL, []
        side, threads = cooperative_tiles.tile_lines(head_dim), cooperative_tiles.THREADS
        if not is_cooperative:
            spec, side = kernels.PAGED_PREFILL, tile_side(head_dim, queries.dtype.size)
            threads = 4 * side * dim_split(head_dim)
            tiles = num_tiles(head_dim, queries.dtype.size, side)
            of_tiles = [("SIDE", side), ("TILES", tiles)]
        plan = PrefillPlan.of(tables, attention.window, group, side)
        return self._kernels.dispatch(
            spec,
            {
                "page_tables": uploaded_pages(tables),
                "tiles": plan.tiles,
                "ends": plan.tiles if plan.ends is None else plan.ends,
                "numbers": self._numbers_of(attention, sinks is not None),
                **self._without_sinks(sinks, heads, queries.dtype),
            },
            {"out": (queries.shape, queries.dtype), "fence": FENCE},
            [
                ("T", queries.dtype),
                ("D", head_dim),
                *of_tiles,
                ("IS_QUANTISED", int(k_pool.dtype == quantised.DTYPE)),
                ("HAS_ENDS", int(plan.ends is not None)),
            ],
            (threads, kv_heads, plan.num_tiles),
            (threads, 1, 1),
        )

    def move(
        self, spec: KernelSpec, moves: mx.array, count: int, k_pool: mx.array, v_pool: mx.array
    ) -> Dispatch:
        """Dispatch bit-exact writes to the pools: `count` moves of every kv head."""
        _, kv_heads, _, key_dim = k_pool.shape
        value_dim = v_pool.shape[-1]
        threads = _COPY_THREADS
        threadgroup = (threads, 1, 1)
        if spec is kernels.WRITE_KV_TOKENS:
            row = key_dim * k_pool.dtype.size
            threads = row // (16 if row % 16 == 0 else 4)
            threadgroup = (threads, min(kv_heads, max(1, _COPY_THREADS // threads)), 1)
        return self._kernels.dispatch(
            spec,
            {"moves": moves},
            {"fence": FENCE},
            [("T", k_pool.dtype), ("D", key_dim), ("E", value_dim)],
            (threads, kv_heads, count),
            threadgroup,
        )

    def quantise(self, dtype: mx.Dtype, moves: mx.array, count: int, k_pool: mx.array) -> Dispatch:
        """Dispatch the 8-bit writes of `count` rows of `dtype`."""
        kv_heads = k_pool.shape[1]
        return self._kernels.dispatch(
            kernels.QUANTISE_KV,
            {"moves": moves},
            {"fence": FENCE},
            [("T", dtype), ("D", quantised.head_dim_of(k_pool.shape[-1], k_pool.dtype))],
            (32, kv_heads, count),
            (32, min(kv_heads, _COPY_THREADS // 32), 1),
        )

    def _numbers_of(self, attention: Attention, has_sinks: bool) -> mx.array:
        """The kernels' floats. Weights are powers of two, so log2(e) goes into scores and sinks."""
        scale, _, softcap = attention
        key = (scale, softcap, has_sinks)
        if key not in self._numbers:
            factor = scale * _LOG2_E if softcap is None else scale / softcap
            cap = 0.0 if softcap is None else softcap * _LOG2_E
            self._numbers[key] = upload([factor, cap, float(has_sinks), 0, 0, 0, 0, 0], np.float32)
        return self._numbers[key]

    def _without_sinks(
        self, sinks: mx.array | None, heads: int, dtype: mx.Dtype
    ) -> dict[str, mx.array]:
        """Return a placeholder for the sinks of a layer without them."""
        if sinks is not None:
            return {}
        key = (heads, dtype)
        if key not in self._no_sinks:
            self._no_sinks[key] = mx.zeros(max(SMALLEST_INPUT, heads), dtype)
        return {"sinks": self._no_sinks[key]}


def with_sinks(sinks: mx.array | None) -> dict[str, mx.array]:
    """Return a layer's sinks, padded for a kernel."""
    if sinks is None:
        return {}
    missing = SMALLEST_INPUT - sinks.size
    return {"sinks": mx.pad(sinks, (0, missing)) if missing > 0 else sinks}


def uploaded_pages(tables: SequenceTables) -> mx.array:
    """The page tables on the device."""
    (on_device,) = tables.upload(("page_tables",), lambda tables: (page_tables(tables),))
    return on_device

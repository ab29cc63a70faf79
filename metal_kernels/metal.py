"""MetalBackend: the ops as Metal kernels over pools that are written in place.

Owns the order of kernels (`fences.py`) and knows their texts only by their buffers (`kernels.py`).
Pools are (num_pages, kv_heads, page_size, row): a page's tile of one head is contiguous.

In-place writes are correct under these rules; breaking one corrupts data silently: a kernel that
uses a pool binds the fences of the kernels it must follow; a pool is one row-contiguous array,
passed whole and never replaced (MLX binds its `first_page`); inside mx.compile only what
`recording` returns may run, with pools and fences that are arguments; no other op of mlx reads a
pool while a step is running (call `settle()` first).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from copy import copy

import mlx.core as mx
import numpy as np

from metal_kernels import kernels, quantised
from metal_kernels.dispatches import Dispatches, with_sinks
from metal_kernels.fences import Fences
from metal_kernels.few_rows import FewRows
from metal_kernels.gathered_attention import GatheredAttention
from metal_kernels.kernels import Dispatch, Factory, Kernels
from metal_kernels.latents import LatentAttention
from metal_kernels.limits import PAGE_SIZES
from metal_kernels.long_chunks import ChunkRun, Gathered, can_copy, runs_of
from metal_kernels.ops import (
    FLOATS,
    Attention,
    Heads,
    Norms,
    Projected,
    Slots,
    check_attention,
    check_copy,
    check_decode,
    check_latent,
    shapes_of,
)
from metal_kernels.plans import upload
from metal_kernels.reading import evaluate
from metal_kernels.refusals import check_pools, dims_of, refusal
from metal_kernels.replay import Replay
from metal_kernels.resizing import copy_start
from metal_kernels.step_ways import StepWay
from metal_kernels.tables import Plans, SequenceTables
from metal_kernels.writes import Writes, without_length

DTYPES = FLOATS


class MetalBackend:
    """The ops as kernels made by `factory`."""

    name = "metal"
    writes_in_place = True
    takes_model_rows = True

    def __init__(
        self,
        factory: Factory,
        *,
        uses_matrices: bool = True,
        joins_drafts: bool = True,
        without: frozenset[StepWay] = frozenset(),
    ) -> None:
        """Build kernels on first use.

        uses_matrices: decode groups of many query heads by a kernel of their own
        joins_drafts: read the pages of a draft's rows together, by a kernel of its own
        without: ways that no step goes
        """
        self.without = without
        self._kernels = Kernels(factory)
        self._dispatches = Dispatches(
            self._kernels, uses_matrices=uses_matrices, joins_drafts=joins_drafts
        )
        self._latents = LatentAttention(self._kernels)
        self._writes = Writes(self._kernels, self._dispatches)
        self.few_rows = FewRows(self._kernels)
        self.replay = Replay(self._kernels)
        self.use_fences(Fences())

    def new_pool(
        self, num_pages: int, kv_heads: int, page_size: int, head_dim: int, dtype: mx.Dtype
    ) -> mx.array:
        """Raises ValueError for shapes and dtypes that the kernels do not support."""
        computed_in = mx.float32 if dtype == quantised.DTYPE else dtype
        if (reason := refusal(head_dim, head_dim, computed_in)) is not None:
            raise ValueError(reason)
        if page_size not in PAGE_SIZES:
            raise ValueError(f"pages have {PAGE_SIZES} slots, got {page_size}")
        width = quantised.row_width(head_dim, dtype)
        return self._added(mx.zeros((num_pages, kv_heads, page_size, width), dtype))

    def _added(self, pool: mx.array) -> mx.array:
        mx.eval(pool)
        # mlx passes a copy of any other array to a kernel, and writes to the copy would be lost.
        assert memoryview(pool).c_contiguous  # type: ignore[arg-type]  # mlx does not say so
        self.fences.add(pool)
        return pool

    def resize_pool(self, pool: mx.array, num_pages: int, page_size: int) -> mx.array:
        assert page_size == pool.shape[2], "the pool has pages of another size"
        self.settle()
        resized = mx.zeros((num_pages, *pool.shape[1:]), pool.dtype)
        copy_start(pool, resized, min(num_pages, pool.shape[0]))
        return self._added(resized)

    def settle(self, *_pools: mx.array) -> None:
        """Wait for all writes to all pools: evaluating a pool would wait for none of them."""
        evaluate(*self.fences.pending())

    def write_kv(
        self,
        keys: mx.array,
        values: mx.array,
        k_pool: mx.array,
        v_pool: mx.array,
        slots: Slots,
        plans: Plans | None = None,
    ) -> tuple[mx.array, mx.array]:
        kept = plans or Plans()
        writes = kept.plan(
            ("write", shapes_of(keys, values, k_pool, v_pool)),
            lambda: self._writes.of_rows(keys, values, k_pool, v_pool, slots, kept),
        )
        for write in writes:
            self._run_move(write, k_pool, v_pool, keys=keys, values=values)
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
        k_pool, v_pool = pools
        kept = plans or Plans()
        write = kept.plan(
            (heads, len(projected), self.fences.kind(k_pool, v_pool)),  # all rows have one dtype
            lambda: self._writes.of_rotated(projected, turns, heads, norms, pools, slots, kept),
        )
        queries, keys, values = projected if len(projected) == 3 else (projected[0],) * 3
        rows = {"queries": queries, "keys": keys, "values": values, "turns": turns}
        if norms is not None:
            rows["q_weight"], rows["k_weight"] = norms
        queries, fence = self._run_write(write, k_pool, v_pool, rows)
        self.fences.after_write(k_pool, fence)
        return queries, pools

    def read_kv(
        self, k_pool: mx.array, v_pool: mx.array, slots: Slots
    ) -> tuple[mx.array, mx.array]:
        check_pools(k_pool, v_pool, may_be_latent=True)
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
        check_pools(k_pool, v_pool, may_be_latent=True)
        if page_size != k_pool.shape[2]:
            raise ValueError(f"pages of this pool have {k_pool.shape[2]} slots, not {page_size}")
        if len(sources):
            moves = upload(np.stack([sources, targets], axis=1))
            copy = self._dispatches.move(kernels.COPY_PAGES, moves, len(sources), k_pool, v_pool)
            self._run_move(copy, k_pool, v_pool)
        return k_pool, v_pool

    def paged_decode(
        self,
        queries: mx.array,
        k_pool: mx.array,
        v_pool: mx.array,
        tables: SequenceTables,
        attention: Attention,
        sinks: mx.array | None = None,
    ) -> mx.array:
        def plan() -> tuple[Dispatch, Dispatch]:
            check_attention(without_length(queries), k_pool, v_pool, tables, attention, sinks)
            check_pools(k_pool, v_pool)
            check_decode(tables)
            return self._dispatches.decode(queries, k_pool, tables, attention, sinks)

        key = ("decode", *self._key(queries, k_pool, v_pool, attention, sinks))
        attend, merge = tables.plan(key, plan)
        after = self.fences.before_read(k_pool)
        partials, fence = attend(queries=queries, k_pool=k_pool, v_pool=v_pool, after=after)
        self.fences.after_read(k_pool, fence)
        (out,) = merge(partials=partials, **with_sinks(sinks))
        return out

    def paged_prefill(
        self,
        queries: mx.array,
        k_pool: mx.array,
        v_pool: mx.array,
        tables: SequenceTables,
        attention: Attention,
        sinks: mx.array | None = None,
    ) -> mx.array:
        def rows_of(run: ChunkRun) -> mx.array:
            return queries if run.tables is tables else queries[run.first_row : run.end_row]

        def plan() -> list[tuple[ChunkRun, Dispatch | None]]:
            """Pair the chunks with their tile kernel; None for those of MLX's attention.

            MLX's attention has no softcap.
            """
            check_attention(without_length(queries), k_pool, v_pool, tables, attention, sinks)
            check_pools(k_pool, v_pool)
            kind = queries.shape[-1], queries.dtype
            may_copy = attention.softcap is None and can_copy(
                queries.shape[1], *kind, has_sinks=sinks is not None, without=self.without
            )
            runs = runs_of(tables, k_pool.shape[1], *kind, attention.window, may_copy=may_copy)
            of_tiles = k_pool, attention, sinks
            return [
                (
                    run,
                    self._tiles_of(run, rows_of(run), *of_tiles) if run.gathered is None else None,
                )
                for run in runs
            ]

        key = ("runs", *self._key(queries, k_pool, v_pool, attention, sinks))
        outputs = []
        for run, tiles in tables.plan(key, plan):
            rows = rows_of(run)
            if tiles is not None:
                output = self._by_tiles(tiles, rows, k_pool, v_pool, sinks)
            else:
                assert run.gathered is not None
                output = self._gathered.attend(
                    rows, k_pool, v_pool, run.tables, run.gathered, attention, sinks
                )
            outputs.append(output)
        return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)

    def _tiles_of(
        self,
        run: ChunkRun,
        rows: mx.array,
        k_pool: mx.array,
        attention: Attention,
        sinks: mx.array | None,
    ) -> Dispatch:
        return self._dispatches.prefill(
            rows, k_pool, run.tables, attention, sinks, is_cooperative=run.is_cooperative
        )

    def attend_tiles(
        self,
        queries: mx.array,
        k_pool: mx.array,
        v_pool: mx.array,
        tables: SequenceTables,
        attention: Attention,
        sinks: mx.array | None = None,
        *,
        is_cooperative: bool = False,
    ) -> mx.array:
        """Like `paged_prefill`, by a tile kernel, which reads the pages themselves.

        is_cooperative: by the one of cooperative tensors
        """
        attend = tables.plan(
            ("prefill", is_cooperative, *self._key(queries, k_pool, v_pool, attention, sinks)),
            lambda: self._dispatches.prefill(
                queries, k_pool, tables, attention, sinks, is_cooperative=is_cooperative
            ),
        )
        return self._by_tiles(attend, queries, k_pool, v_pool, sinks)

    def attend_copies(
        self,
        queries: mx.array,
        k_pool: mx.array,
        v_pool: mx.array,
        tables: SequenceTables,
        attention: Attention,
        sinks: mx.array | None = None,
        *,
        block_bytes: int = 0,
    ) -> mx.array:
        """Like `paged_prefill` of one chunk, by MLX's attention over copies of its pages.

        block_bytes: scores of a block of rows, by MLX's unfused attention; 0: by its fused one

        Raises ValueError if MLX has no fused one.
        """
        window = attention.window
        gathered = tables.plan(
            ("copies", window, block_bytes),
            lambda: Gathered.from_tables(tables, window, block_bytes),
        )
        return self._gathered.attend(queries, k_pool, v_pool, tables, gathered, attention, sinks)

    def _by_tiles(
        self,
        attend: Dispatch,
        queries: mx.array,
        k_pool: mx.array,
        v_pool: mx.array,
        sinks: mx.array | None,
    ) -> mx.array:
        after = self.fences.before_read(k_pool)
        out, fence = attend(
            queries=queries, k_pool=k_pool, v_pool=v_pool, after=after, **with_sinks(sinks)
        )
        self.fences.after_read(k_pool, fence)
        return out

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
        def plan() -> tuple[Dispatch, Dispatch | None]:
            check_latent(q_latent, q_rope, k_pool, v_pool, tables)
            if (reason := refusal(*dims_of(k_pool, v_pool)[:3], is_latent=True)) is not None:
                raise ValueError(reason)
            return self._latents.dispatches(q_latent, q_rope, tables, scale)

        key = ("latent", scale, shapes_of(q_latent, q_rope, k_pool, v_pool))
        attend, merge = tables.plan(key, plan)
        after = self.fences.before_read(k_pool)
        out, fence = attend(
            q_latent=q_latent, q_rope=q_rope, k_pool=k_pool, v_pool=v_pool, after=after
        )
        self.fences.after_read(k_pool, fence)
        if merge is not None:
            (out,) = merge(partials=out)
        return out

    def recording(
        self, k_pools: Sequence[mx.array], fences: Sequence[list[mx.array]]
    ) -> MetalBackend:
        """Return a backend for one recorded step of decodes, whose fences start with these."""
        own = Fences()
        for pool in k_pools:
            own.add(pool)
        own.resume(k_pools, fences)
        other = copy(self)
        other.use_fences(own)
        return other

    def use_fences(self, fences: Fences) -> None:
        """Order all kernels by these fences from now on."""
        self.fences = fences
        self._gathered = GatheredAttention(self._kernels, fences)

    def gather_kv(
        self,
        k_pool: mx.array,  # noqa: ARG002
        v_pool: mx.array,  # noqa: ARG002
        tables: SequenceTables,  # noqa: ARG002
    ) -> tuple[mx.array, mx.array]:
        """Raises ValueError: plain arrays of a pool that is written in place need a copy each."""
        raise ValueError('the Metal backend gathers no sequence; attention_backend="cpu" does')

    def _key(
        self,
        queries: mx.array,
        k_pool: mx.array,
        v_pool: mx.array,
        attention: Attention,
        sinks: mx.array | None,
    ) -> tuple[Hashable, ...]:
        """Key of a plan of attention, besides the tables."""
        of_sinks = None if sinks is None else (sinks.shape, sinks.dtype)
        kind = self.fences.kind(k_pool, v_pool)
        return attention, kind, queries.shape, queries.dtype, of_sinks

    def _run_move(
        self, move: Dispatch, k_pool: mx.array, v_pool: mx.array, **rows: mx.array
    ) -> None:
        (fence,) = self._run_write(move, k_pool, v_pool, rows)
        self.fences.after_write(k_pool, fence)

    def _run_write(
        self, write: Dispatch, k_pool: mx.array, v_pool: mx.array, rows: dict[str, mx.array]
    ) -> list[mx.array]:
        first, second = self.fences.before_write(k_pool)
        return write(**rows, k_pool=k_pool, v_pool=v_pool, after_a=first, after_b=second)

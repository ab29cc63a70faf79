"""PlainBackend: the ops as updates and mlx's own attention over views of the pool, on any device.

Pool layout: (kv_heads, num_pages * page_size, head_dim). With the slots of a head side by side, a
run of consecutive pages is a strided view that attention reads without a copy. (Gathering pages
instead costs +18 % of a decode step at batch 1 and +80 % at batch 16; 95M parameters, context 512.)
Swap the first two axes to get from the reference's and Metal's layout to this one.

A Mac computes layers with it that the kernels do not take; a Linux CPU has the one of `x86/`.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from metal_kernels import mlx_attention, rotary
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
    shapes_of,
)
from metal_kernels.pool_rows import RowWrites, Runs, padded_slots, row_index, take_rows
from metal_kernels.quantised import row_width, stored
from metal_kernels.reading import evaluate
from metal_kernels.resizing import copy_start
from metal_kernels.tables import IntArray, Plans, SequenceTables

MAX_GATHERED = (
    1 << 23
)  # numbers of keys, of all sequences, as what is copied of a layer takes memory


@dataclass(frozen=True, slots=True)
class Seen:
    """The rows of a sequence, and the slots that any of them sees."""

    rows: slice
    runs: Runs
    ends: (
        IntArray | None
    )  # of rows that see positions after their own, from the first of the slots on


@dataclass(frozen=True, slots=True)
class PaddedContexts:
    """The positions that decodes see, to be copied side by side and padded to the longest."""

    index: mx.array  # (kv_heads, sequences, positions), for `take_rows`
    unseen: mx.array  # (sequences, 1, 1, positions) float32: 0, or minus infinity for padding


class PlainBackend:
    """The ops as functional updates and attention over views of the pool."""

    name = "cpu"
    writes_in_place = False
    takes_model_rows = False

    def new_pool(
        self, num_pages: int, kv_heads: int, page_size: int, head_dim: int, dtype: mx.Dtype
    ) -> mx.array:
        return mx.zeros((kv_heads, num_pages * page_size, row_width(head_dim, dtype)), dtype)

    def write_kv(
        self,
        keys: mx.array,
        values: mx.array,
        k_pool: mx.array,
        v_pool: mx.array,
        slots: Slots,
        plans: Plans | None = None,
    ) -> tuple[mx.array, mx.array]:
        kept = (plans or Plans()).kept
        key = ("write", shapes_of(keys, values, k_pool, v_pool))
        writes = kept.get(key)
        if writes is None:
            check_write(keys, values, k_pool, v_pool, slots)
            writes = kept[key] = RowWrites.of(slots)
        writes.write(k_pool, stored(keys, k_pool))
        writes.write(v_pool, stored(values, v_pool))
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
        where = mx.array(slots)
        keys, values = k_pool[:, where].swapaxes(0, 1), v_pool[:, where].swapaxes(0, 1)
        mx.eval(keys, values)
        return keys, values

    def gather_kv(
        self, k_pool: mx.array, v_pool: mx.array, tables: SequenceTables
    ) -> tuple[mx.array, mx.array]:
        check_gather(tables)
        [seen] = tables.plan("gather_kv", lambda: seen_by(tables, None))
        return seen.runs.read(k_pool, mx.float32), seen.runs.read(v_pool, mx.float32)

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
        is_cut = attention.window is not None or attention.softcap is not None
        if len(tables) == 1 or is_cut or not _fits(tables, k_pool):
            return self.paged_prefill(queries, k_pool, v_pool, tables, attention, sinks)

        def plan() -> PaddedContexts:
            check_attention(queries, k_pool, v_pool, tables, attention, sinks)
            return _gathered(tables, k_pool)

        copied = tables.plan(("gathered", shapes_of(queries, k_pool, v_pool, sinks)), plan)
        keys, values = (take_rows(pool, copied.index, queries.dtype) for pool in (k_pool, v_pool))
        return mlx_attention.attend_gathered(queries, keys, values, copied.unseen, attention, sinks)

    def paged_prefill(
        self,
        queries: mx.array,
        k_pool: mx.array,
        v_pool: mx.array,
        tables: SequenceTables,
        attention: Attention,
        sinks: mx.array | None = None,
    ) -> mx.array:
        """Attend once per sequence, over views of the pool where its pages are consecutive."""

        def plan() -> list[Seen]:
            check_attention(queries, k_pool, v_pool, tables, attention, sinks)
            return seen_by(tables, attention.window)

        key = ("seen", attention, shapes_of(queries, k_pool, v_pool, sinks))
        outputs = []
        for seen in tables.plan(key, plan):
            output = self._attend(
                queries[None, seen.rows].swapaxes(1, 2),
                seen.runs.read(k_pool, queries.dtype),
                seen.runs.read(v_pool, queries.dtype),
                attention,
                sinks,
                seen.ends,
            )
            outputs.append(output.squeeze(0).swapaxes(0, 1))
        return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)

    def _attend(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        attention: Attention,
        sinks: mx.array | None,
        ends: IntArray | None,
    ) -> mx.array:
        """Attend like `mlx_attention.attend`."""
        return mlx_attention.attend(queries, keys, values, attention, sinks, ends)

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
        if tables.num_rows == len(tables) > 1 and _fits(tables, k_pool):
            copied = tables.plan(("gathered", k_pool.shape), lambda: _gathered(tables, k_pool))
            latents, keys = (take_rows(pool, copied.index, pool.dtype) for pool in (k_pool, v_pool))
            return mlx_attention.attend_gathered_latents(
                q_latent, q_rope, latents, keys, copied.unseen, scale=scale
            )
        outputs = [
            self._attend_latents(
                q_latent[seen.rows],
                q_rope[seen.rows],
                seen.runs.read(k_pool, q_latent.dtype)[0, 0],
                seen.runs.read(v_pool, q_latent.dtype)[0, 0],
                scale=scale,
            )
            for seen in tables.plan(("seen", None), lambda: seen_by(tables, None))
        ]
        return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)

    def _attend_latents(
        self,
        q_latent: mx.array,
        q_rope: mx.array,
        latents: mx.array,
        keys: mx.array,
        *,
        scale: float,
    ) -> mx.array:
        """Attend like `mlx_attention.attend_latents`."""
        return mlx_attention.attend_latents(q_latent, q_rope, latents, keys, scale=scale)

    def copy_pages(
        self,
        k_pool: mx.array,
        v_pool: mx.array,
        sources: Slots,
        targets: Slots,
        page_size: int,
    ) -> tuple[mx.array, mx.array]:
        check_copy(k_pool, v_pool, sources, targets, page_size)
        read = [
            (
                pool,
                [mx.contiguous(pool[:, _page(source, page_size)]) for source in sources.tolist()],
            )
            for pool in (k_pool, v_pool)
        ]
        # Evaluated first: while anything reads a pool, mlx writes to a copy of the whole pool.
        mx.eval([pages for _, pages in read])
        for pool, pages in read:
            for target, page in zip(targets.tolist(), pages, strict=True):
                pool[:, _page(target, page_size)] = page
        return k_pool, v_pool

    def settle(self, *pools: mx.array) -> None:
        evaluate(*pools)

    def resize_pool(self, pool: mx.array, num_pages: int, page_size: int) -> mx.array:
        kv_heads, num_slots, width = pool.shape
        resized = mx.zeros((kv_heads, num_pages * page_size, width), pool.dtype)
        copy_start(pool, resized, min(num_slots, num_pages * page_size), axis=1)
        mx.eval(resized)
        return resized


def seen_by(tables: SequenceTables, window: int | None) -> list[Seen]:
    """Return what each sequence sees."""
    seen = []
    for sequence, first_row, end_row in tables.queries():
        context, rows = int(tables.context_lens[sequence]), end_row - first_row
        first = 0 if window is None else max(0, context - rows - window + 1)
        ends = tables.ends_of(sequence)
        ends = None if ends is None else ends - first
        seen.append(Seen(slice(first_row, end_row), Runs(tables.runs(sequence, first)), ends))
    return seen


def _fits(tables: SequenceTables, k_pool: mx.array) -> bool:
    """True if all contexts can be copied, padded to the longest."""
    kv_heads, _, width = k_pool.shape
    return len(tables) * int(tables.context_lens.max()) * kv_heads * width <= MAX_GATHERED


def _gathered(tables: SequenceTables, k_pool: mx.array) -> PaddedContexts:
    sequences = range(len(tables))
    slots, unseen = padded_slots(tables, sequences, np.zeros(len(tables), np.int32))
    return PaddedContexts(row_index(slots, k_pool), mx.array(unseen)[:, None, None])


def _page(page: int, page_size: int) -> slice:
    """The slots of a page."""
    return slice(page * page_size, (page + 1) * page_size)

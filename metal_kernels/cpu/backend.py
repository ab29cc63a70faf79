"""CpuBackend: the ops as updates and attention in plain mlx, in the fastest order for a CPU.

Pool layout: (kv_heads, num_pages * page_size, head_dim). With the slots of a head side by side, a
run of consecutive pages is a strided view that attention reads without a copy. (Gathering pages
instead costs +18 % of a decode step at batch 1 and +80 % at batch 16; 95M parameters, context 512.)
Swap the first two axes to get from the reference's and Metal's layout to this one.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import mlx.core as mx
import numpy as np

from metal_kernels.cpu import cascade, latent
from metal_kernels.cpu.attention import attend, is_faster_written_out, is_float32_on_cpu
from metal_kernels.cpu.pool_rows import Runs, padded_slots, row_index, take_rows, write_rows
from metal_kernels.cpu.written_out import attend_row_written_out, attend_rows_written_out
from metal_kernels.ops import (
    Slots,
    check_attention,
    check_copy,
    check_decode,
    check_gather,
    check_latent,
    check_write,
)
from metal_kernels.quantised import row_width, stored
from metal_kernels.reading import evaluate
from metal_kernels.resizing import copy_start
from metal_kernels.tables import IntArray, SequenceTables

# Rows of keys of the longest sequence, over its heads, up to which decodes are gathered into one attention:
# a dozen operations per sequence cost more than copying so few rows. A layer of 12 query and 4 kv heads of 64
# dimensions, 2-core x86, gathered and one by one: 16 decodes over 160 positions 1.2 and 2.5 ms, over 520 4.0 and
# 3.2, over 1,100 11 and 4.4; 4 decodes over 520 0.9 and 0.8.
MAX_GATHERED_ROWS = 2_048
# Of sequences whose pages are in several runs that limit is as many times higher, because each run takes two
# products more. The same layer with 2 and 5 runs of pages for each sequence: 8 decodes over 520 positions 2.0
# and 1.7 ms gathered, 2.1 and 3.3 one by one; over 1,100 4.4 and 4.4, 3.1 and 4.6; over 2,048 10 and 11, 4.3 and 7.5.
_SCATTERED = 2
_MOST_GATHERED_ROWS = 1 << 17  # of all sequences, as what is copied of a layer takes memory
# Numbers of keys for each run of pages from which on joining a decode's scores is faster than copying its keys.
# A row of 8 query and 4 kv heads of 64 dimensions: 516 positions in 2 runs (66,000) 0.19 and 0.21 ms, in
# 3 0.23 and 0.22, 1,040 in 3 (89,000) 0.41 and 0.44; 8 heads of 128: 516 in 3 (180,000) 0.54 and 0.71, in 8 0.91 and 0.87.
_LEAST_OF_RUN = 1 << 16
# Scores from which on gathered decodes are written out. 4 of them over 160 positions take 0.35 ms that way and
# 0.30 by mlx's kernel, over 320 0.57 and 0.62.
_MANY_GATHERED_SCORES = 12_288


class CpuBackend:
    """The ops as functional updates and attention over views of the pool."""

    name = "cpu"
    writes_in_place = False
    takes_model_rows = False

    def __init__(self, max_gathered_rows: int = MAX_GATHERED_ROWS) -> None:
        self._max_gathered_rows = max_gathered_rows

    def new_pool(
        self, num_pages: int, kv_heads: int, page_size: int, head_dim: int, dtype: mx.Dtype
    ) -> mx.array:
        return mx.zeros((kv_heads, num_pages * page_size, row_width(head_dim, dtype)), dtype)

    def write_kv(
        self, keys: mx.array, values: mx.array, k_pool: mx.array, v_pool: mx.array, slots: Slots
    ) -> tuple[mx.array, mx.array]:
        check_write(keys, values, k_pool, v_pool, slots)
        write_rows((k_pool, v_pool), (stored(keys, k_pool), stored(values, v_pool)), slots)
        return k_pool, v_pool

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
        runs = _runs(tables, 0)
        return runs.read(k_pool, mx.float32), runs.read(v_pool, mx.float32)

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
        check_decode(tables)
        check_attention(queries, k_pool, v_pool, tables, window, softcap, sinks)
        if len(tables) > 1 and window is None and softcap is None:
            if self._is_small(tables, k_pool):
                return _attend_gathered(queries, k_pool, v_pool, tables, scale, sinks)
            if sinks is None and is_float32_on_cpu(queries.dtype):  # see `cascade.py`
                grouping = tables.plan("cascade", lambda: cascade.group_rows(tables))
                if grouping.groups:
                    return self._attend_in_groups(queries, k_pool, v_pool, tables, grouping, scale)
            if self._is_scattered(tables, k_pool):
                return _attend_gathered(queries, k_pool, v_pool, tables, scale, sinks)
        return _attend_one_by_one(queries, k_pool, v_pool, tables, scale, window, softcap, sinks)

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
        return _attend_one_by_one(queries, k_pool, v_pool, tables, scale, window, softcap, sinks)

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
        if tables.num_rows == len(tables) > 1 and self._is_small(tables, k_pool):
            slots, unseen = tables.plan("gathered", lambda: _gathered(tables))
            index = tables.plan("latents", lambda: mx.array(slots))
            latents, keys = (take_rows(pool, index, pool.dtype) for pool in (k_pool, v_pool))
            return latent.attend_gathered(q_latent, q_rope, latents, keys, unseen, scale=scale)
        outputs = []
        for sequence, first_row, end_row in tables.queries():
            runs = _runs(tables, sequence)
            outputs.append(
                latent.attend(
                    q_latent[first_row:end_row],
                    q_rope[first_row:end_row],
                    runs.read(k_pool, q_latent.dtype)[0, 0],
                    runs.read(v_pool, q_latent.dtype)[0, 0],
                    scale=scale,
                )
            )
        return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)

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

    def resize_pool(
        self, pool: mx.array, num_pages: int, page_size: int, sources: Slots, targets: Slots
    ) -> mx.array:
        check_copy(pool, pool, sources, targets, page_size)
        kv_heads, num_slots, width = pool.shape
        resized = mx.zeros((kv_heads, num_pages * page_size, width), pool.dtype)
        copy_start(pool, resized, min(num_slots, num_pages * page_size), axis=1)
        for source, target, count in _runs_of_moves(sources, targets):
            from_ = slice(source * page_size, (source + count) * page_size)
            to = slice(target * page_size, (target + count) * page_size)
            resized[:, to] = pool[:, from_]
        mx.eval(resized)
        return resized

    def _is_small(self, tables: SequenceTables, k_pool: mx.array) -> bool:
        return _longest_rows(tables, k_pool) <= self._max_gathered_rows

    def _is_scattered(self, tables: SequenceTables, k_pool: mx.array) -> bool:
        """Whether decodes that share too little to attend in groups are gathered as well."""
        rows = _longest_rows(tables, k_pool)
        is_possible = rows <= _SCATTERED * self._max_gathered_rows
        if not is_possible or rows * len(tables) > _MOST_GATHERED_ROWS:
            return False
        return tables.num_breaks >= len(tables)

    def _attend_in_groups(
        self,
        queries: mx.array,
        k_pool: mx.array,
        v_pool: mx.array,
        tables: SequenceTables,
        grouping: cascade.Grouping,
        scale: float,
    ) -> mx.array:
        """Each group of rows at once, then the other rows, which share too little."""
        pools, outputs = (k_pool, v_pool), []
        for group in grouping.groups:
            index = tables.plan(
                ("own", group.rows[0], k_pool.shape), partial(row_index, group.own, k_pool)
            )
            keys, values = (group.shared.read(pool, queries.dtype).squeeze(0) for pool in pools)
            own_keys, own_values = (take_rows(pool, index, queries.dtype) for pool in pools)
            outputs.append(
                cascade.attend(
                    queries[mx.array(group.rows)],
                    *(keys, values, own_keys, own_values),
                    scale=scale,
                    unseen=group.unseen,
                )
            )
        if grouping.rest is not None:
            rest = queries[mx.array(grouping.rest_rows)]
            outputs.append(self.paged_decode(rest, k_pool, v_pool, grouping.rest, scale=scale))
        return mx.concatenate(outputs)[mx.array(grouping.order)]


def _longest_rows(tables: SequenceTables, k_pool: mx.array) -> int:
    """Rows of keys of the longest sequence, over its kv heads."""
    return int(tables.context_lens.max()) * k_pool.shape[0]


def _page(page: int, page_size: int) -> slice:
    """The slots of a page."""
    return slice(page * page_size, (page + 1) * page_size)


def _attend_one_by_one(
    queries: mx.array,
    k_pool: mx.array,
    v_pool: mx.array,
    tables: SequenceTables,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: mx.array | None,
) -> mx.array:
    """One attention per sequence, over views of the pool where its pages are consecutive."""
    outputs = []
    for sequence, first_row, end_row in tables.queries():
        context = int(tables.context_lens[sequence])
        rows = end_row - first_row
        first = 0 if window is None else max(0, context - rows - window + 1)
        runs = _runs(tables, sequence, first)
        kv_heads = k_pool.shape[0]
        if (
            rows == 1
            and softcap is None
            and _joins_scores(queries, kv_heads, context - first, runs)
        ):
            keys, values = (runs.read_each(pool, queries.dtype) for pool in (k_pool, v_pool))
            outputs.append(
                attend_row_written_out(
                    queries[first_row:end_row].squeeze(0), keys, values, scale=scale, sinks=sinks
                )
            )
            continue
        outputs.append(
            attend(
                queries[None, first_row:end_row].swapaxes(1, 2),
                runs.read(k_pool, queries.dtype),
                runs.read(v_pool, queries.dtype),
                scale=scale,
                window=window,
                softcap=softcap,
                sinks=sinks,
            )
            .squeeze(0)
            .swapaxes(0, 1)
        )
    return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)


def _runs(tables: SequenceTables, sequence: int, first: int = 0) -> Runs:
    """Of a sequence's positions from `first` on."""
    return tables.plan((sequence, first), lambda: Runs(tables.runs(sequence, first)))


def _joins_scores(queries: mx.array, kv_heads: int, positions: int, runs: Runs) -> bool:
    """Whether a decode's scores of each run are joined, and its keys are not copied."""
    _, heads, head_dim = queries.shape
    if len(runs) == 1:
        return is_faster_written_out(heads * positions, queries.dtype)
    is_long = kv_heads * positions * head_dim >= _LEAST_OF_RUN * len(runs)
    return is_long and is_float32_on_cpu(queries.dtype)


def _attend_gathered(
    queries: mx.array,
    k_pool: mx.array,
    v_pool: mx.array,
    tables: SequenceTables,
    scale: float,
    sinks: mx.array | None,
) -> mx.array:
    """One attention for all sequences, over copies of their keys and values."""
    slots, unseen = tables.plan("gathered", lambda: _gathered(tables))
    index = tables.plan(("index", k_pool.shape), lambda: row_index(slots, k_pool))
    keys, values = (take_rows(pool, index, queries.dtype) for pool in (k_pool, v_pool))
    num_scores = queries.shape[1] * slots.size
    if is_faster_written_out(num_scores, queries.dtype, _MANY_GATHERED_SCORES):
        return attend_rows_written_out(
            queries, keys, values, scale=scale, unseen=unseen, sinks=sinks
        )
    return mx.fast.scaled_dot_product_attention(
        queries[:, :, None],
        keys.swapaxes(0, 1),
        values.swapaxes(0, 1),
        scale=scale,
        mask=unseen.astype(queries.dtype),
        sinks=sinks,
    )[:, :, 0]


def _gathered(tables: SequenceTables) -> tuple[IntArray, mx.array]:
    """Of every sequence: the slots of its positions, and 0 or, past its end, minus infinity.

    (sequences, positions), (sequences, 1, 1, positions) float32.
    """
    slots, unseen = padded_slots(tables, list(range(len(tables))), 0)
    return slots, mx.array(unseen)[:, None, None]


def _runs_of_moves(sources: Slots, targets: Slots) -> list[tuple[int, int, int]]:
    """(first source, first target, pages) of each run of pages that move together."""
    breaks = (np.flatnonzero((np.diff(sources) != 1) | (np.diff(targets) != 1)) + 1).tolist()
    bounds = [0, *breaks, len(sources)]
    return [
        (int(sources[begin]), int(targets[begin]), end - begin)
        for begin, end in pairwise(bounds)
        if end > begin
    ]

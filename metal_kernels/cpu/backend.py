"""The ops in plain mlx: the specification, the tests' oracle, and the CPU path.

Pool layout here: (kv_heads, num_pages * page_size, head_dim). With the slots side by side per
head, a run of consecutive pages is a strided view that attention reads without a copy (gathering
pages instead costs +18 % of a decode step at batch 1 and +80 % at batch 16, 95M parameters,
context 512). The Metal kernels' layout is (num_pages, kv_heads, page_size, head_dim): swap the
first two axes to go from one to the other.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import mlx.core as mx
import numpy as np

from metal_kernels.cpu import cascade
from metal_kernels.cpu.attention import attend, attend_masked
from metal_kernels.cpu.zeros import lazy_zeros
from metal_kernels.ops import Slots, check_attention, check_copy, check_write, halves
from metal_kernels.tables import IntArray, SequenceTables

# Rows of keys, of all sequences and heads, up to which decodes are gathered into one attention: a
# dozen operations per sequence cost more than copying so little. CPU time of a step of 16 decodes,
# one thread: 2.9M parameters with 64 tokens of context 31.9 -> 20.2 ms, with 512 54 -> 37; 100M
# parameters with 128 tokens 420 -> 399, but with 512 (twice this limit) 552 -> 574.
_GATHERED_ROWS = 16_384


class CpuBackend:
    """The ops as functional updates and mlx's own attention."""

    name = "cpu"
    writes_in_place = False

    def new_pool(
        self, num_pages: int, kv_heads: int, page_size: int, head_dim: int, dtype: mx.Dtype
    ) -> mx.array:
        return lazy_zeros((kv_heads, num_pages * page_size, head_dim), dtype)

    def write_kv(
        self, keys: mx.array, values: mx.array, k_pool: mx.array, v_pool: mx.array, slots: Slots
    ) -> tuple[mx.array, mx.array]:
        check_write(keys, values, k_pool, v_pool, slots)
        for first_row, last_row, slot in _consecutive(slots):
            where = slice(slot, slot + last_row - first_row)
            k_pool[:, where] = keys[first_row:last_row].swapaxes(0, 1)
            v_pool[:, where] = values[first_row:last_row].swapaxes(0, 1)
        return k_pool, v_pool

    def read_kv(
        self, k_pool: mx.array, v_pool: mx.array, slots: Slots
    ) -> tuple[mx.array, mx.array]:
        where = mx.array(slots)
        keys, values = k_pool[:, where].swapaxes(0, 1), v_pool[:, where].swapaxes(0, 1)
        mx.eval(keys, values)
        return keys, values

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
        if tables.num_rows != len(tables):
            raise ValueError("paged_decode takes one row per sequence")
        longest = int(tables.context_lens.max())
        is_small = len(tables) * longest * k_pool.shape[0] <= _GATHERED_ROWS
        is_plain = window is None and softcap is None
        if (
            len(tables) > 1
            and is_plain
            and not is_small
            and sinks is None
            and _is_cascading(queries)
        ):
            parts = tables.plan("cascade", lambda: cascade.split(tables))
            if parts.groups:
                check_attention(queries, k_pool, v_pool, tables, window, softcap, sinks)
                return self._in_groups(queries, k_pool, v_pool, parts, scale)
        if len(tables) == 1 or not is_small or not is_plain:
            return self.paged_prefill(
                queries,
                k_pool,
                v_pool,
                tables,
                scale=scale,
                window=window,
                softcap=softcap,
                sinks=sinks,
            )
        check_attention(queries, k_pool, v_pool, tables, window, softcap, sinks)
        slots, unseen = tables.plan("gathered", lambda: _gathered(tables))
        return mx.fast.scaled_dot_product_attention(
            queries[:, :, None],
            k_pool[:, slots].swapaxes(0, 1),
            v_pool[:, slots].swapaxes(0, 1),
            scale=scale,
            mask=unseen.astype(queries.dtype),
            sinks=sinks,
        )[:, :, 0]

    def _in_groups(
        self,
        queries: mx.array,
        k_pool: mx.array,
        v_pool: mx.array,
        parts: cascade.Split,
        scale: float,
    ) -> mx.array:
        outputs = [
            attend_masked(
                queries[None, mx.array(group.rows)].swapaxes(1, 2),
                _read(k_pool, group.runs),
                _read(v_pool, group.runs),
                group.unseen,
                scale=scale,
            )[0].swapaxes(0, 1)
            for group in parts.groups
        ]
        if parts.rest is not None:
            rest = queries[mx.array(parts.rest_rows)]
            outputs.append(self.paged_decode(rest, k_pool, v_pool, parts.rest, scale=scale))
        return mx.concatenate(outputs)[mx.array(parts.order)]

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
        outputs = []
        for sequence, first_row, last_row in tables.queries():
            context = int(tables.context_lens[sequence])
            rows = last_row - first_row
            first = 0 if window is None else max(0, context - rows - window + 1)
            runs = tables.plan((sequence, first), partial(tables.runs, sequence, first))
            outputs.append(
                attend(
                    queries[None, first_row:last_row].swapaxes(1, 2),
                    _read(k_pool, runs),
                    _read(v_pool, runs),
                    scale=scale,
                    window=window,
                    softcap=softcap,
                    sinks=sinks,
                )[0].swapaxes(0, 1)
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
        for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
            from_ = slice(source * page_size, (source + 1) * page_size)
            to = slice(target * page_size, (target + 1) * page_size)
            k_pool[:, to] = k_pool[:, from_]
            v_pool[:, to] = v_pool[:, from_]
        return k_pool, v_pool

    def resize_pool(
        self, pool: mx.array, num_pages: int, page_size: int, sources: Slots, targets: Slots
    ) -> mx.array:
        check_copy(pool, pool, sources, targets, page_size)
        kv_heads, num_slots, head_dim = pool.shape
        resized = self.new_pool(num_pages, kv_heads, page_size, head_dim, pool.dtype)
        for part in halves(min(num_slots, num_pages * page_size)):
            resized[:, part] = pool[:, part]
        for source, target, count in _runs_of_moves(sources, targets):
            from_ = slice(source * page_size, (source + count) * page_size)
            to = slice(target * page_size, (target + count) * page_size)
            resized[:, to] = pool[:, from_]
        mx.eval(resized)
        return resized


def _runs_of_moves(sources: Slots, targets: Slots) -> list[tuple[int, int, int]]:
    """(first source, first target, pages) of what moves side by side."""
    breaks = (np.flatnonzero((np.diff(sources) != 1) | (np.diff(targets) != 1)) + 1).tolist()
    bounds = [0, *breaks, len(sources)]
    return [
        (int(sources[begin]), int(targets[begin]), end - begin)
        for begin, end in pairwise(bounds)
        if end > begin
    ]


def _is_cascading(queries: mx.array) -> bool:
    """Where reading a shared beginning once was measured to pay: see `cascade.py`."""
    return bool(mx.default_device() == mx.cpu and queries.dtype == mx.float32)


def _gathered(tables: SequenceTables) -> tuple[mx.array, mx.array]:
    """Of every sequence: the slots of its positions, and 0 or, past its end, minus infinity.

    (sequences, positions) int32, (sequences, 1, 1, positions) float32. Past its end stands a
    sequence's first slot, which holds a number.
    """
    position = np.arange(tables.context_lens.max())
    is_seen = position < tables.context_lens[:, None]
    pages = tables.page_tables[:, position // tables.page_size]
    slots: IntArray = pages * tables.page_size + position % tables.page_size
    slots = np.where(is_seen, slots, tables.page_tables[:, :1] * tables.page_size)
    unseen = np.where(is_seen, np.float32(0), np.float32(-np.inf))
    return mx.array(slots), mx.array(unseen)[:, None, None]


def _consecutive(slots: Slots) -> list[tuple[int, int, int]]:
    """(first row, row after the last, first slot) of each run of rows with consecutive slots."""
    breaks = (np.flatnonzero(np.diff(slots) != 1) + 1).tolist()
    bounds = [0, *breaks, len(slots)]
    return [(begin, end, int(slots[begin])) for begin, end in pairwise(bounds) if end > begin]


def _read(pool: mx.array, runs: list[tuple[int, int]]) -> mx.array:
    """(1, kv_heads, positions, head_dim): a view where the positions lie in one run."""
    parts = [pool[None, :, start:end] for start, end in runs]
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=2)

"""Decodes on a CPU: one row of each sequence, in the cheaper of two ways.

    gathered   the keys of all sequences are copied side by side, padded to the longest: one product for all
    joined     a product for each run of pages that a sequence has, over a view of the pool: only scores
               are copied. Sequences that share a prefix are rows of the same products over it

                 shared by the group ............ | each row's own
        row 0    one product for the queries      | a product for each row, over copies that are padded
        row 1    of all rows                      | to the longest

Both are groups: in a gathered one nothing is shared, in a joined one of a single row everything is.

A layer of 12 query and 4 kv heads of 64 dimensions, one x86 thread, gathered and joined: 16 decodes over 64
positions 0.4 and 1.7 ms, over 500 3.6 and 3.6, over 2,000 14 and 10; 4 over 2,000 positions in 32 runs 3.7 and
4.1. 16 over 1,000 positions, 896 of them shared: 7.3 gathered, 9.0 joined one by one, 2.4 in a group.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from metal_kernels import mlx_attention
from metal_kernels.ops import Attention
from metal_kernels.plain import MAX_GATHERED
from metal_kernels.pool_rows import Runs, padded_slots, row_index, take_rows
from metal_kernels.tables import SequenceTables
from metal_kernels.x86.exponential import LOG2_E, exp2, tanh
from metal_kernels.x86.reductions import row_max, row_sum

# Scores below which mlx's own kernel is faster than what is written out here: a layer of one decode over 64
# positions 0.06 and 0.11 ms, over 300 0.12 and 0.14, over 1,000 0.31 and 0.26; of 4 over 64 0.16 and 0.21.
FEW_SCORES = 6_144
# Numbers of keys that are copied in the time that one more product takes.
COPIED_PER_PRODUCT = 1 << 17

Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Rows that attend together.

    where    the rows of the dispatch
    shared   what all of them see; None if that is nothing
    own      (kv_heads, rows, positions): the slots of what follows, padded; for `take_rows`
    unseen   (rows, 1, positions) float32: 0, or minus infinity for padding
    """

    rows: list[int]
    where: slice | mx.array
    shared: Runs | None
    own: mx.array | None = None
    unseen: mx.array | None = None

    @classmethod
    def from_rows(
        cls,
        tables: SequenceTables,
        rows: Sequence[int],
        firsts: Integers,
        shared: Runs | None,
        k_pool: mx.array,
    ) -> DecodeGroup:
        """Build a group; `firsts`: of each row, the first position that is its own."""
        rows = list(rows)
        slots, unseen = padded_slots(tables, rows, firsts)
        is_a_slice = rows == list(range(rows[0], rows[-1] + 1))
        where = slice(rows[0], rows[-1] + 1) if is_a_slice else mx.array(rows)
        return cls(rows, where, shared, row_index(slots, k_pool), mx.array(unseen)[:, None])

    @property
    def num_products(self) -> int:
        """Number of products of queries and keys."""
        return (0 if self.shared is None else len(self.shared)) + (self.own is not None)

    @property
    def num_positions(self) -> int:
        """Positions that a row sees, padded to the longest."""
        shared = () if self.shared is None else self.shared.bounds
        num_own = 0 if self.own is None else self.own.shape[-1]
        return num_own + sum(end - first for first, end in shared)

    def attend(
        self,
        queries: mx.array,
        k_pool: mx.array,
        v_pool: mx.array,
        attention: Attention,
        sinks: mx.array | None,
    ) -> mx.array:
        """Return (rows, heads, value_dim) for queries (rows, heads, head_dim)."""
        num_scores = self.num_positions * queries.shape[0] * queries.shape[1]
        # Each row sees keys of its own.
        is_apart = self.shared is None or len(self.rows) == 1
        if is_apart and attention.softcap is None and num_scores < FEW_SCORES:
            return self._attend_by_mlx(queries, k_pool, v_pool, attention, sinks)
        return self._attend_written_out(queries, k_pool, v_pool, attention, sinks)

    def _attend_by_mlx(
        self,
        queries: mx.array,
        k_pool: mx.array,
        v_pool: mx.array,
        attention: Attention,
        sinks: mx.array | None,
    ) -> mx.array:
        """Attend by mlx's kernel: a fifth of the operations, slower over many scores."""
        if self.shared is not None:
            keys, values = (self.shared.read(pool, mx.float32) for pool in (k_pool, v_pool))
            # What is outside the window is not read.
            every = Attention(attention.scale)
            return mlx_attention.attend(queries[:, :, None], keys, values, every, sinks)[:, :, 0]
        assert self.own is not None
        assert self.unseen is not None
        keys, values = (take_rows(pool, self.own, mx.float32) for pool in (k_pool, v_pool))
        unseen = self.unseen[:, None]
        return mlx_attention.attend_gathered(queries, keys, values, unseen, attention, sinks)

    def _attend_written_out(
        self,
        queries: mx.array,
        k_pool: mx.array,
        v_pool: mx.array,
        attention: Attention,
        sinks: mx.array | None,
    ) -> mx.array:
        """Attend in float32 with powers of two."""
        rows, heads, head_dim = queries.shape
        kv_heads = k_pool.shape[0]
        factor = attention.scale * (LOG2_E if attention.softcap is None else 1 / attention.softcap)
        scaled = (queries * factor).reshape(rows, kv_heads, -1, head_dim).swapaxes(0, 1)
        # All queries of a kv head: rows of a product.
        flat = scaled.reshape(kv_heads, -1, head_dim)
        shape, keys, values = scaled.shape[:3], self._read(k_pool), self._read(v_pool)
        scores = [(flat @ each.swapaxes(-1, -2)).reshape(*shape, -1) for each in keys]
        if self.own is not None:
            scores.append(scaled @ take_rows(k_pool, self.own, mx.float32).swapaxes(-1, -2))
        if attention.softcap is not None:
            scores = [attention.softcap * LOG2_E * tanh(each) for each in scores]
        if self.unseen is not None:
            scores[-1] = scores[-1] + self.unseen
        joined = scores[0] if len(scores) == 1 else mx.concatenate(scores, axis=-1)
        largest = row_max(joined)
        if sinks is not None:
            sinks = LOG2_E * sinks.astype(mx.float32).reshape(kv_heads, 1, -1, 1)
            largest = mx.maximum(largest, sinks)
        weights = exp2(joined, largest)
        total = row_sum(weights)
        if sinks is not None:
            total = total + exp2(sinks, largest)
        ends = list(accumulate(each.shape[-1] for each in scores))
        parts = mx.split(weights, ends[:-1], axis=-1)
        outputs = [
            (part.reshape(*flat.shape[:2], -1) @ each).reshape(*shape, -1)
            for part, each in zip(parts, values, strict=False)
        ]
        if self.own is not None:
            outputs.append(parts[-1] @ take_rows(v_pool, self.own, mx.float32))
        output = functools.reduce(mx.add, outputs) / total
        return output.swapaxes(0, 1).reshape(rows, heads, -1)

    def _read(self, pool: mx.array) -> list[mx.array]:
        """Read the shared part, run by run: (kv_heads, positions, dim)."""
        return [] if self.shared is None else self.shared.read_each(pool, mx.float32)


@dataclass(frozen=True, slots=True)
class Decodes:
    """The rows of a dispatch in groups. `order` restores the dispatch's; None if equal."""

    groups: list[DecodeGroup]
    order: mx.array | None

    @classmethod
    def from_tables(
        cls,
        tables: SequenceTables,
        window: int | None,
        k_pool: mx.array,
        copied_per_product: int = COPIED_PER_PRODUCT,
    ) -> Decodes:
        """Group the rows.

        copied_per_product: numbers of keys that are copied in the time of one more product
        """
        contexts = tables.context_lens.astype(np.int64)
        firsts = np.maximum(0, contexts - (window or contexts))
        groups = list(_joined(tables, firsts, k_pool))
        num_copied = len(tables) * _numbers(contexts - firsts, k_pool)
        num_products = sum(group.num_products for group in groups)
        if num_copied < copied_per_product * (num_products - 1):
            parts = _parts(range(len(tables)), _numbers(contexts - firsts, k_pool))
            groups = [
                DecodeGroup.from_rows(tables, rows, firsts[rows], None, k_pool) for rows in parts
            ]
        rows = [row for group in groups for row in group.rows]
        is_sorted = rows == list(range(len(tables)))
        return cls(groups, None if is_sorted else mx.array(np.argsort(rows)))

    def attend(
        self,
        queries: mx.array,
        k_pool: mx.array,
        v_pool: mx.array,
        attention: Attention,
        sinks: mx.array | None,
    ) -> mx.array:
        """Return (rows, heads, value_dim)."""
        if len(self.groups) == 1:
            return self.groups[0].attend(queries, k_pool, v_pool, attention, sinks)
        outputs = [
            group.attend(queries[group.where], k_pool, v_pool, attention, sinks)
            for group in self.groups
        ]
        output = mx.concatenate(outputs)
        return output if self.order is None else output[self.order]


def _joined(tables: SequenceTables, firsts: Integers, k_pool: mx.array) -> Iterator[DecodeGroup]:
    """Yield groups of rows that share most of what they see, and each of the others alone."""
    for rows in _same_first_page(tables, firsts):
        if len(rows) == 1:
            yield _alone(tables, rows[0], firsts)
            continue
        num_shared = _num_shared(tables, rows)
        own = tables.context_lens[rows] - num_shared
        if num_shared >= int(own.max()):
            shared = Runs(tables.runs(rows[0], 0, num_shared))
            for part in _parts(rows, _numbers(own, k_pool)):
                yield DecodeGroup.from_rows(
                    tables, part, np.full(len(part), num_shared), shared, k_pool
                )
            continue
        yield from (_alone(tables, row, firsts) for row in rows)


def _alone(tables: SequenceTables, row: int, firsts: Integers) -> DecodeGroup:
    return DecodeGroup([row], slice(row, row + 1), Runs(tables.runs(row, int(firsts[row]))))


def _same_first_page(tables: SequenceTables, firsts: Integers) -> list[list[int]]:
    """Group rows that might share a prefix; one whose window begins after it is alone."""
    by_page: dict[tuple[int, int], list[int]] = {}
    pages = tables.page_tables[:, 0].tolist()
    for row, (page, first) in enumerate(zip(pages, firsts.tolist(), strict=True)):
        by_page.setdefault((page, row if first else -1), []).append(row)
    return list(by_page.values())


def _num_shared(tables: SequenceTables, rows: list[int]) -> int:
    """Length of the prefix that all rows have on the same pages, in positions."""
    most = (int(tables.context_lens[rows].min()) - 1) // tables.page_size
    pages = tables.page_tables[rows, :most]
    differs = (pages != pages[0]).any(axis=0)
    return (int(differs.argmax()) if differs.any() else most) * tables.page_size


def _numbers(positions: npt.NDArray[np.integer], k_pool: mx.array) -> int:
    """Numbers of the keys of the longest of these contexts."""
    kv_heads, _, width = k_pool.shape
    return int(positions.max()) * kv_heads * width


def _parts(rows: Sequence[int], of_a_row: int) -> Iterator[Sequence[int]]:
    """Split rows so that the copies of a group do not take too much memory."""
    step = max(1, MAX_GATHERED // of_a_row)
    return (rows[at : at + step] for at in range(0, len(rows), step))

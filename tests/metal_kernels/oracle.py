"""An oracle for the ops: attention in float64 numpy over plain arrays, without pages.

A `Case` describes sequences and options; `Paged` writes it to a backend's pool by the backend's own
ops, on pages in any order, with NaN in every unused slot. Tests compare the backend's answer with
the oracle's, for the values as the pool's dtype holds them. Pools are read by slot, so the same cases
serve every layout.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from metal_kernels import rounding
from metal_kernels.ops import Attention, Backend
from metal_kernels.rounding import row_error
from metal_kernels.tables import SequenceTables

# In float32 the emulator computes what a CPU does: 64 units.
TOLERANCES = {**rounding.TOLERANCES, mx.float32: 64 * 2.0**-24}
OUTSIDE = 2**31 - 1  # padding of page tables, which must fail if it is read


@dataclass(frozen=True)
class Case:
    """Sequences of (tokens before the chunk, tokens of the chunk), and the options of attention."""

    sequences: tuple[tuple[int, int], ...]
    page_size: int = 16
    kv_heads: int = 2
    group: int = 2  # query heads per kv head
    key_dim: int = 64
    value_dim: int = 64
    dtype: mx.Dtype = mx.float32
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False
    is_scattered: bool = True
    is_quantised: bool = False  # the pools; `dtype` is that of rows and queries
    # (first, end) of images: their rows see all of them, in the sequences whose chunk has them whole.
    images: tuple[tuple[int, int], ...] = ()

    def ends(self, before: int, rows: int) -> np.ndarray:
        """The position after the last one that each row of a chunk sees."""
        positions = np.arange(before, before + rows)
        ends = positions + 1
        for first, end in self.images:
            if before <= first and end <= before + rows:
                ends[(positions >= first) & (positions < end)] = end
        return ends

    def __str__(self) -> str:
        chunks = "_".join(f"{before}+{rows}" for before, rows in self.sequences[:2])
        words = [f"page{self.page_size}", f"gqa{self.group}", f"d{self.key_dim}", chunks]
        if self.value_dim != self.key_dim:
            words.append(f"dv{self.value_dim}")
        if self.dtype != mx.float32:
            words.append(str(self.dtype).removeprefix("mlx.core."))
        words += [f"window{self.window}"] if self.window else []
        words += ["softcap"] if self.softcap else []
        words += ["sinks"] if self.has_sinks else []
        words += [] if self.is_scattered else ["consecutive"]
        words += ["q8"] if self.is_quantised else []
        words += ["images"] if self.images else []
        return "-".join(words)


def decodes(size: int) -> tuple[tuple[int, int], ...]:
    """Contexts of 1, page_size - 1, page_size, page_size + 1 and several pages."""
    contexts = (1, size - 1, size, size + 1, 3 * size + 5)
    return tuple((context - 1, 1) for context in contexts)


def chunks(size: int) -> tuple[tuple[int, int], ...]:
    """Empty contexts before chunks of all lengths; chunks that start or end inside a page."""
    fresh = tuple((0, rows) for rows in (1, size - 1, size, size + 1, 2 * size + 7))
    return (*fresh, (size // 2, size), (size + 3, 5), (2 * size, size), (2 * size + 3, 1))


def _cases() -> list[Case]:
    options: list[dict[str, Any]] = [
        {},
        {"window": 1},
        {"window": 13},
        {"window": 1000},
        {"softcap": 2.0},
        {"has_sinks": True},
        {"window": 21, "softcap": 2.0, "has_sinks": True},
    ]
    cases = []
    for rows in (decodes, chunks):
        for size in (16, 32, 64):
            cases += [Case(rows(size), size, group=4, **option) for option in options]
        cases += [Case(rows(32), 32, group=group) for group in (1, 8)]
        cases += [Case(rows(32), 32, group=1, kv_heads=1, window=40)]
        cases += [Case(rows(32), 32, key_dim=dim, value_dim=dim) for dim in (80, 96, 112, 128, 256)]
        cases += [Case(rows(16), 16, key_dim=192, value_dim=128)]
        for dtype in (mx.float16, mx.bfloat16):
            cases += [Case(rows(32), 32, dtype=dtype, **option) for option in options]
        cases += [Case(rows(32), 32, is_scattered=False, **option) for option in options[:3]]
    return cases


def cases_of_images() -> list[Case]:
    """Images beside each other, at the ends of a chunk, longer than a window and than a tile."""
    images = ((0, 3), (3, 20), (25, 44))
    sequences = ((0, 46), (3, 41), (21, 24), (30, 5))
    options: list[dict[str, Any]] = [
        {},
        {"window": 7},
        {"window": 30, "softcap": 2.0, "has_sinks": True},
        {"group": 1, "dtype": mx.float16, "window": 40},
        {"group": 3, "dtype": mx.bfloat16, "key_dim": 256, "value_dim": 256},
        {"is_quantised": True, "dtype": mx.float16, "key_dim": 128, "value_dim": 128},
    ]
    return [Case(sequences, images=images, **option) for option in options]


IMAGES = cases_of_images()
CASES = [*_cases(), *IMAGES]


class Paged:
    """A case in a backend's pool. `answer` is the backend's, `expected` the oracle's."""

    def __init__(self, backend: Backend, case: Case) -> None:
        self._backend = backend
        self._case = case
        self._rng = np.random.default_rng(0)
        self.num_pages = sum(self._pages(s) for s in case.sequences) + 3
        self.tables = self._tables()
        heads = case.kv_heads * case.group
        self._queries = [self._draw(rows, heads, case.key_dim) for _, rows in case.sequences]
        lengths = [before + rows for before, rows in case.sequences]
        self._keys = [self._draw(n, case.kv_heads, case.key_dim) for n in lengths]
        self._values = [self._draw(n, case.kv_heads, case.value_dim) for n in lengths]
        self._sinks = self._draw(heads) if case.has_sinks else None
        self.scale = case.key_dim**-0.5

    def answer(self) -> np.ndarray:
        """(rows, heads, value_dim) float64, by paged_decode where every sequence has one row."""
        case, backend = self._case, self._backend
        pools = self.pools()
        is_decode = all(rows == 1 for _, rows in case.sequences)
        op = backend.paged_decode if is_decode else backend.paged_prefill
        output = op(
            mx.array(np.concatenate(self._queries)).astype(case.dtype),
            *pools,
            self.tables,
            Attention(self.scale, window=case.window, softcap=case.softcap),
            None if self._sinks is None else mx.array(self._sinks).astype(case.dtype),
        )
        assert output.dtype == case.dtype
        return np.array(output.astype(mx.float32)).astype(np.float64)

    def expected(self) -> np.ndarray:
        """The same in float64 numpy, from arrays without pages."""
        keys, values = self._keys, self._values
        if self._case.is_quantised:
            keys, values = ([in_8_bits(rows) for rows in side] for side in (keys, values))
        parts = zip(self._queries, keys, values, strict=True)
        return np.concatenate([self._attend(*part) for part in parts])

    def error(self) -> float:
        """The largest difference relative to a row's largest value; NaN where the answer has one."""
        return row_error(self.answer(), self.expected())

    @property
    def tolerance(self) -> float:
        return TOLERANCES[self._case.dtype]

    def keys_and_values(self) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Of each sequence, (length, kv_heads, dimensions)."""
        return self._keys, self._values

    def pools(self) -> tuple[mx.array, mx.array]:
        """(keys, values): NaN everywhere but in the sequences' own slots."""
        case = self._case
        keys, values = (
            self._rows(dim, parts)
            for dim, parts in ((case.key_dim, self._keys), (case.value_dim, self._values))
        )
        pool_dtype = mx.int8 if case.is_quantised else case.dtype
        k_pool, v_pool = (
            self._backend.new_pool(self.num_pages, case.kv_heads, case.page_size, dim, pool_dtype)
            for dim in (case.key_dim, case.value_dim)
        )
        everywhere = np.arange(self.num_pages * case.page_size, dtype=np.int32)
        return self._backend.write_kv(keys, values, k_pool, v_pool, everywhere)

    def _rows(self, head_dim: int, parts: list[np.ndarray]) -> mx.array:
        """The intended contents of each slot of the pool."""
        num_slots = self.num_pages * self._case.page_size
        rows = np.full((num_slots, self._case.kv_heads, head_dim), np.nan, np.float32)
        rows[self.slots()] = np.concatenate(parts)
        return mx.array(rows).astype(self._case.dtype)

    def slots(self) -> np.ndarray:
        """Of all positions of all sequences, one after another."""
        size, found = self._case.page_size, []
        for table, context in zip(self.tables.page_tables, self.tables.context_lens, strict=True):
            positions = np.arange(context)
            found.append(table[positions // size] * size + positions % size)
        return np.concatenate(found)

    def _pages(self, sequence: tuple[int, int]) -> int:
        return -(-sum(sequence) // self._case.page_size)

    def _tables(self) -> SequenceTables:
        case = self._case
        order = np.arange(self.num_pages)
        if case.is_scattered:
            order = self._rng.permutation(order)
        most = max(map(self._pages, case.sequences))
        page_tables = np.full((len(case.sequences), most + 2), OUTSIDE, np.int32)
        first = 0
        for row, sequence in zip(page_tables, case.sequences, strict=True):
            count = self._pages(sequence)
            row[:count] = order[first : first + count]
            first += count
        return SequenceTables(
            page_tables=page_tables,
            context_lens=np.array([sum(s) for s in case.sequences], np.int32),
            query_starts=np.cumsum([0, *(rows for _, rows in case.sequences)], dtype=np.int32),
            page_size=case.page_size,
            ends=self._ends(),
        )

    def _ends(self) -> np.ndarray | None:
        if not self._case.images:
            return None
        ends = [self._case.ends(*sequence) for sequence in self._case.sequences]
        return np.concatenate(ends).astype(np.int32)

    def _draw(self, *shape: int) -> np.ndarray:
        """Normal numbers that the case's dtype holds exactly, as float32."""
        return np.array(draw(self._rng, shape, self._case.dtype).astype(mx.float32))

    def _attend(self, queries: np.ndarray, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
        """(rows, heads, value_dim) of one sequence."""
        case, context = self._case, len(keys)
        rows, key = np.arange(context - len(queries), context)[:, None], np.arange(context)
        ends = case.ends(context - len(queries), len(queries))[:, None]
        is_seen = (key < ends) & (key > rows - (case.window or context))
        queries, keys, values = (
            np.repeat(side, heads, axis=1).swapaxes(0, 1).astype(np.float64)
            for side, heads in ((queries, 1), (keys, case.group), (values, case.group))
        )
        scores = queries @ keys.swapaxes(1, 2) * self.scale  # (heads, rows, context)
        if case.softcap is not None:
            scores = case.softcap * np.tanh(scores / case.softcap)
        scores = np.where(is_seen, scores, -np.inf)
        sinks = np.full(len(queries), -np.inf) if self._sinks is None else self._sinks
        sinks = sinks.astype(np.float64)[:, None, None]
        highest = np.maximum(scores.max(axis=2, keepdims=True), sinks)
        weights = np.exp(scores - highest)
        total = weights.sum(axis=2, keepdims=True) + np.exp(sinks - highest)
        return (weights / total @ values).swapaxes(0, 1)


def draw(rng: np.random.Generator, shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    """Normal numbers."""
    return mx.array(rng.standard_normal(shape, np.float32)).astype(dtype)


def quantised(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(int8 values, float32 scales with a last axis of 1) as `ops.py` states them, in numpy."""
    highest = np.abs(rows.astype(np.float32)).max(axis=-1, keepdims=True)
    is_kept = np.isfinite(highest) & (highest >= 2.0**-119)
    with np.errstate(invalid="ignore"):
        scales = np.where(is_kept, highest / np.float32(127), np.float32(0))
        values = np.rint(rows.astype(np.float32) / np.where(is_kept, scales, np.float32(1)))
        values = np.where(is_kept, values, 0).astype(np.int8)
    return values, np.where(np.isfinite(highest), scales, np.float32(np.nan))


def in_8_bits(rows: np.ndarray) -> np.ndarray:
    """What a quantised pool holds of these rows, as float64."""
    values, scales = quantised(rows)
    held: np.ndarray = values.astype(np.float64) * scales
    return held


def read_slots(pool: mx.array) -> np.ndarray:
    """(slots, kv_heads, head_dim) as unsigned integers: bits can be compared, NaN included."""
    unsigned = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32}[pool.dtype.size]
    bits = np.array(pool.view(unsigned))
    if bits.ndim == 3:  # (kv_heads, slots, head_dim)
        return bits.swapaxes(0, 1)
    pages, kv_heads, size, head_dim = bits.shape
    return bits.swapaxes(1, 2).reshape(pages * size, kv_heads, head_dim)

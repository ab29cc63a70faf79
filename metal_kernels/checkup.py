"""A backend on this machine: how far its ops are from the reference, and how fast Metal's are.

`check_ops` compares every op with the reference, computed in float32 from the same numbers: the
error is the op's own rounding.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from metal_kernels.metal import DTYPES, MetalBackend
from metal_kernels.ops import HEAD_DIMS, Backend
from metal_kernels.reading import read
from metal_kernels.reference import ReferenceBackend
from metal_kernels.tables import IntArray, SequenceTables

Floats = npt.NDArray[np.float32]

# The largest error relative to the largest value that a dtype's rounding explains.
TOLERANCES = {mx.float32: 1e-5, mx.float16: 3e-3, mx.bfloat16: 2e-2}

_PAGE_SIZE = 32
_KV_HEADS = 2
_GROUP = 4
# (tokens before the chunk, rows of the chunk)
_DECODES = ((0, 1), (31, 1), (300, 1))
_CHUNKS = ((0, 33), (20, 40))


@dataclass(frozen=True, slots=True)
class OpCheck:
    """The error of one op against the reference, relative to the largest value."""

    op: str
    dtype: mx.Dtype
    head_dim: int
    error: float
    tolerance: float  # 0 for writes and copies

    @property
    def is_right(self) -> bool:
        return self.error <= self.tolerance  # False for NaN


@dataclass(frozen=True, slots=True)
class Speeds:
    """Achieved GB/s: keys and values read by a decode; read and written by the two writes."""

    decode: float
    write_pages: float
    write_tokens: float

    @property
    def page_gain(self) -> float:
        """How much faster whole pages are written than single rows."""
        return self.write_pages / self.write_tokens


def check_ops(backend: Backend, head_dims: Sequence[int] = HEAD_DIMS) -> Iterator[OpCheck]:
    """Check every op in every dtype and head dimension; yields each result at once."""
    for dtype in DTYPES:
        for head_dim in head_dims:
            yield from _check(backend, dtype, head_dim)


def _check(backend: Backend, dtype: mx.Dtype, head_dim: int) -> Iterator[OpCheck]:
    for op, sequences in (("paged_decode", _DECODES), ("paged_prefill", _CHUNKS)):
        tables = _tables(sequences)
        num_pages = tables.page_tables.size + 1
        slots = np.arange((num_pages - 1) * _PAGE_SIZE, dtype=np.int32)[:-3]  # pages, and rows
        keys, values = (_draw((len(slots), _KV_HEADS, head_dim), dtype, s) for s in (1, 2))
        queries = _draw((tables.num_rows, _KV_HEADS * _GROUP, head_dim), dtype, 3)
        pools = _pools(backend, num_pages, head_dim, dtype)
        pools = backend.write_kv(keys, values, *pools, slots)
        source, target = num_pages - 3, num_pages - 1
        moves = np.array([source], np.int32), np.array([target], np.int32)
        pools = backend.copy_pages(*pools, *moves, _PAGE_SIZE)
        answer = _attend(backend, op, queries, pools, tables)
        if op == "paged_decode":
            written = _largest_difference(backend.read_kv(*pools, slots), (keys, values))
            yield OpCheck("write_kv", dtype, head_dim, written, 0)
            pages = (backend.read_kv(*pools, _slots_of(page)) for page in (source, target))
            yield OpCheck("copy_pages", dtype, head_dim, _largest_difference(*pages), 0)
        expected = _expected(op, keys, values, queries, slots, tables)
        error = np.abs(answer - expected).max() / np.abs(expected).max()
        yield OpCheck(op, dtype, head_dim, float(error), TOLERANCES[dtype])


def _expected(
    op: str,
    keys: mx.array,
    values: mx.array,
    queries: mx.array,
    slots: IntArray,
    tables: SequenceTables,
) -> Floats:
    """The reference's answer in float32."""
    reference = ReferenceBackend()
    pools = _pools(reference, tables.page_tables.size + 1, keys.shape[-1], mx.float32)
    rows = keys.astype(mx.float32), values.astype(mx.float32)
    pools = reference.write_kv(*rows, *pools, slots)
    return _attend(reference, op, queries.astype(mx.float32), pools, tables)


def _attend(
    backend: Backend,
    op: str,
    queries: mx.array,
    pools: tuple[mx.array, mx.array],
    tables: SequenceTables,
) -> Floats:
    attend = backend.paged_decode if op == "paged_decode" else backend.paged_prefill
    output = attend(queries, *pools, tables, scale=queries.shape[-1] ** -0.5)
    return read(output.astype(mx.float32))


def _slots_of(page: int) -> IntArray:
    return page * _PAGE_SIZE + np.arange(_PAGE_SIZE, dtype=np.int32)


def _largest_difference(ours: Sequence[mx.array], theirs: Sequence[mx.array]) -> float:
    """NaN where one of them has one."""
    differences = (
        np.abs(read((one - other).astype(mx.float32)))
        for one, other in zip(ours, theirs, strict=True)
    )
    return float(np.max([difference.max() for difference in differences]))


def _pools(
    backend: Backend, num_pages: int, head_dim: int, dtype: mx.Dtype
) -> tuple[mx.array, mx.array]:
    keys, values = (
        backend.new_pool(num_pages, _KV_HEADS, _PAGE_SIZE, head_dim, dtype) for _ in range(2)
    )
    return keys, values


def _tables(sequences: Sequence[tuple[int, int]]) -> SequenceTables:
    contexts = [before + rows for before, rows in sequences]
    most = -(-max(contexts) // _PAGE_SIZE)
    pages = np.arange(len(sequences) * most, dtype=np.int32)[::-1]
    return SequenceTables(
        page_tables=pages.reshape(len(sequences), most),
        context_lens=np.fromiter(contexts, np.int32),
        query_starts=np.cumsum([0, *(rows for _, rows in sequences)], dtype=np.int32),
        page_size=_PAGE_SIZE,
    )


def _draw(shape: tuple[int, ...], dtype: mx.Dtype, seed: int) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)


def measure(
    backend: MetalBackend,
    *,
    batch: int = 8,
    context: int = 4096,
    kv_heads: int = 8,
    head_dim: int = 128,
    repeats: int = 20,
) -> Speeds:
    """GB/s in float16, the best of `repeats`; by default for a batch of long contexts, 128 MB."""
    num_pages = batch * context // _PAGE_SIZE
    shape = (num_pages, kv_heads, _PAGE_SIZE, head_dim)
    pools = [backend.new_pool(*shape, mx.float16) for _ in range(2)]
    rows = _draw((context, kv_heads, head_dim), mx.float16, 1)
    queries = _draw((batch, kv_heads * _GROUP, head_dim), mx.float16, 2)
    tables = SequenceTables(
        page_tables=np.arange(num_pages, dtype=np.int32).reshape(batch, -1),
        context_lens=np.full(batch, context, np.int32),
        query_starts=np.arange(batch + 1, dtype=np.int32),
        page_size=_PAGE_SIZE,
    )
    whole = np.arange(context, dtype=np.int32)
    mx.eval(rows, queries)

    def write(slots: IntArray) -> Callable[[], None]:
        def run() -> None:
            backend.write_kv(rows, rows, pools[0], pools[1], slots)
            backend.settle()

        return run

    def decode() -> None:
        mx.eval(backend.paged_decode(queries, pools[0], pools[1], tables, scale=head_dim**-0.5))

    row_bytes = 2 * kv_heads * head_dim * 2  # keys and values
    return Speeds(
        decode=batch * context * row_bytes / _best_of(repeats, decode),
        write_pages=2 * context * row_bytes / _best_of(repeats, write(whole)),
        # In reverse order no two rows are consecutive: the same slots, row by row.
        write_tokens=2 * context * row_bytes / _best_of(repeats, write(whole[::-1].copy())),
    )


def _best_of(repeats: int, run: Callable[[], None]) -> float:
    """Nanoseconds, so that bytes divided by them are GB/s. The first run also compiles."""
    times = []
    for _ in range(repeats + 1):
        started = time.perf_counter_ns()
        run()
        times.append(time.perf_counter_ns() - started)
    return float(min(times[1:]))

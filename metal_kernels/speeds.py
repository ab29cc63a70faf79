"""Speed of attention and the writes on this machine, without a model.

Beside the paged ops stands mlx's own attention over the same keys in one contiguous array, which is
what mlx-lm computes with. Several ops are launched for each wait, each after the one before it: a
single one would mostly measure the time to launch a command buffer and to wait for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import mlx.core as mx
import numpy as np

from metal_kernels import quantised
from metal_kernels.latents import LATENT_DIMS
from metal_kernels.metal import MetalBackend
from metal_kernels.ops import Attention, Backend
from metal_kernels.reading import evaluate
from metal_kernels.tables import IntArray, Plans, SequenceTables
from metal_kernels.unfused_attention import BLOCK_BYTES

PAGE_SIZE = 32
GROUP = 4


@dataclass(frozen=True, slots=True)
class Speeds:
    """Achieved GB/s: keys and values read by a decode; read and written by the two writes."""

    decode: float
    write_pages: float
    write_tokens: float

    @property
    def page_gain(self) -> float:
        """Speed-up of writing whole pages over single rows."""
        return self.write_pages / self.write_tokens


@dataclass(frozen=True, slots=True)
class TimedAttention:
    """`batch` sequences of `context` tokens, whose last `rows` attend.

    group: query heads of a kv head
    by_tiles: chunks by the tile kernel, also where the backend would have MLX's attention read
        copies
    is_cooperative: by the tile kernel of cooperative tensors
    by_copies: the other way round, by the fused attention; of one sequence
    by_blocks: by MLX's unfused attention over copies; of one sequence
    pool_bytes: of a pool that is larger than the sequences need; 0 for what they need
    """

    context: int
    batch: int = 1
    rows: int = 1
    kv_heads: int = 8
    head_dim: int = 128
    dtype: mx.Dtype = mx.float16
    group: int = GROUP
    is_quantised: bool = False
    by_tiles: bool = False
    is_cooperative: bool = False
    by_copies: bool = False
    by_blocks: bool = False
    pool_bytes: int = 0

    @property
    def page_size(self) -> int:
        return PAGE_SIZE

    @property
    def pool_dtype(self) -> mx.Dtype:
        return quantised.DTYPE if self.is_quantised else self.dtype

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's keys and values."""
        width = quantised.row_width(self.head_dim, self.pool_dtype)
        return 2 * self.kv_heads * width * self.pool_dtype.size

    @property
    def kv_bytes(self) -> int:
        """Bytes that one op reads at least."""
        return self.batch * self.context * self.token_bytes

    @property
    def num_pages(self) -> int:
        """Pages of the pool."""
        wanted = self.pool_bytes // (self.token_bytes * PAGE_SIZE)
        return max(wanted, self.batch * -(-self.context // PAGE_SIZE))

    @property
    def scale(self) -> float:
        return float(self.head_dim**-0.5)

    def queries(self) -> mx.array:
        shape = self.batch * self.rows, self.kv_heads * self.group, self.head_dim
        return _draw(shape, self.dtype, 2)

    def tables(self) -> SequenceTables:
        pages = self.batch * -(-self.context // PAGE_SIZE)
        return SequenceTables(
            page_tables=np.arange(pages, dtype=np.int32).reshape(self.batch, -1),
            context_lens=np.full(self.batch, self.context, np.int32),
            query_starts=np.arange(self.batch + 1, dtype=np.int32) * self.rows,
            page_size=PAGE_SIZE,
        )


def paged_seconds(
    backend: Backend, what: TimedAttention, repeats: int = 5, queued: int = 8
) -> float:
    """Seconds of one op of the backend: decodes for one row, else chunks."""
    shape = (what.num_pages, what.kv_heads, PAGE_SIZE, what.head_dim)
    pools = [backend.new_pool(*shape, what.pool_dtype) for _ in range(2)]
    tables = what.tables()
    op = _op_of(backend, what)
    queries = what.queries()
    evaluate(queries, *pools)

    def run() -> None:
        output = queries
        # Each asks with the answer of the one before it.
        for _ in range(queued):
            output = op(output, pools[0], pools[1], tables, Attention(what.scale))
        evaluate(output)

    return best_of(repeats, run) / 1e9 / queued


def _op_of(backend: Backend, what: TimedAttention) -> Callable[..., mx.array]:
    """Return the op, by the way that `what` asks for."""
    if isinstance(backend, MetalBackend):
        if what.by_tiles or what.is_cooperative:
            return partial(backend.attend_tiles, is_cooperative=what.is_cooperative)
        if what.by_copies or what.by_blocks:
            return partial(backend.attend_copies, block_bytes=BLOCK_BYTES if what.by_blocks else 0)
    return backend.paged_decode if what.rows == 1 else backend.paged_prefill


def dense_seconds(what: TimedAttention, repeats: int = 5, queued: int = 8) -> float:
    """Seconds of one call of mlx's own attention over contiguous keys and values."""
    heads = what.kv_heads * what.group
    shape = (what.batch, what.kv_heads, what.context, what.head_dim)
    keys, values = mx.zeros(shape, what.dtype), mx.zeros(shape, what.dtype)
    queries = what.queries().reshape(what.batch, what.rows, heads, what.head_dim)
    queries = queries.transpose(0, 2, 1, 3)
    mask = None if what.rows == 1 else "causal"
    evaluate(queries, keys, values)

    def run() -> None:
        output = queries
        for _ in range(queued):
            output = mx.fast.scaled_dot_product_attention(
                output, keys, values, scale=what.scale, mask=mask
            )
        evaluate(output)

    return best_of(repeats, run) / 1e9 / queued


def latent_seconds(
    backend: Backend, what: TimedAttention, repeats: int = 5, queued: int = 8
) -> float:
    """Seconds of attention over latents of 512 numbers and rotated keys of 64, by `group` heads."""
    dims = LATENT_DIMS[0]
    k_pool, v_pool = (
        backend.new_pool(what.num_pages, 1, PAGE_SIZE, dim, what.dtype) for dim in dims
    )
    tables = what.tables()
    rows = what.batch * what.rows
    latent, rope = (_draw((rows, what.group, dim), what.dtype, 2) for dim in dims)
    evaluate(latent, rope, k_pool, v_pool)

    def run() -> None:
        output = latent
        for _ in range(queued):
            output = backend.paged_latent(
                output, rope, k_pool, v_pool, tables, scale=sum(dims) ** -0.5
            )
        evaluate(output)

    return best_of(repeats, run) / 1e9 / queued


def memory_bandwidth(nbytes: int = 256 << 20, repeats: int = 5) -> float:
    """GB/s of adding to an array of `nbytes`: what no attention exceeds."""
    array = mx.ones((nbytes // 4,), mx.float32)
    evaluate(array)
    return 2 * nbytes / best_of(repeats, lambda: evaluate(array + 1.0))


def measure(
    backend: MetalBackend,
    *,
    batch: int = 8,
    context: int = 4096,
    kv_heads: int = 8,
    head_dim: int = 128,
    repeats: int = 20,
    queued: int = 8,
) -> Speeds:
    """GB/s in float16, the best of `repeats`; by default for a batch of long contexts, 128 MB."""
    num_pages = batch * context // PAGE_SIZE
    shape = (num_pages, kv_heads, PAGE_SIZE, head_dim)
    k_pool, v_pool = (backend.new_pool(*shape, mx.float16) for _ in range(2))
    rows = _draw((context, kv_heads, head_dim), mx.float16, 1)
    queries = _draw((batch, kv_heads * GROUP, head_dim), mx.float16, 2)
    tables = SequenceTables(
        page_tables=np.arange(num_pages, dtype=np.int32).reshape(batch, -1),
        context_lens=np.full(batch, context, np.int32),
        query_starts=np.arange(batch + 1, dtype=np.int32),
        page_size=PAGE_SIZE,
    )
    whole = np.arange(context, dtype=np.int32)
    evaluate(rows, queries)

    def write(slots: IntArray) -> Callable[[], None]:
        plans = Plans()

        def run() -> None:
            for _ in range(queued):  # ordered by the fences
                backend.write_kv(rows, rows, k_pool, v_pool, slots, plans)
            backend.settle()

        return run

    def decode() -> None:
        output = queries
        # Each asks with the answer of the one before it.
        for _ in range(queued):
            output = backend.paged_decode(output, k_pool, v_pool, tables, Attention(head_dim**-0.5))
        evaluate(output)

    row_bytes = queued * 2 * kv_heads * head_dim * 2  # keys and values
    return Speeds(
        decode=batch * context * row_bytes / best_of(repeats, decode),
        write_pages=2 * context * row_bytes / best_of(repeats, write(whole)),
        # In reverse order no two rows are consecutive: the same slots, row by row.
        write_tokens=2 * context * row_bytes / best_of(repeats, write(whole[::-1].copy())),
    )


def _draw(shape: tuple[int, ...], dtype: mx.Dtype, seed: int) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)


def best_of(repeats: int, run: Callable[[], None]) -> float:
    """Best time in nanoseconds, so that bytes divided by it are GB/s.

    The first run also compiles.
    """
    times = []
    for _ in range(repeats + 1):
        started = time.perf_counter_ns()
        run()
        times.append(time.perf_counter_ns() - started)
    return float(min(times[1:]))

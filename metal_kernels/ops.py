"""The ops: their shapes, the rules for their arguments, and the protocol of what computes them.

Rows are tokens. For T rows, H query heads, K kv heads, head dimension D and S sequences:

    write_kv(keys, values, k_pool, v_pool, slots, plans) -> (k_pool, v_pool)
        keys, values    (T, K, D), the pool's dtype; float into a quantised pool
        slots           (T,) int32, all different: row t goes to slot slots[t], bit-exact
        plans           what is made of these slots for a step's other layers; None: for no other call
        returns the pools to use from here on (the arguments must not be used again)
    rotate_and_write(projected, turns, heads, norms, pools, slots, plans) -> ((T, H, 1, D), pools)
        what lies between a layer's projections and its attention: queries and keys are normalised and
        rotated, keys and values written, queries returned; see `rotary.py`
    paged_decode(queries, k_pool, v_pool, tables, attention, sinks) -> (S, H, D)
        queries         (S, H, D): one row per sequence, its newest position
    paged_prefill(queries, k_pool, v_pool, tables, attention, sinks) -> (T, H, D)
        queries         (T, H, D): the rows of each sequence's chunk, causal within it
    paged_latent(q_latent, q_rope, k_pool, v_pool, tables, *, scale) -> (T, H, L)
        attention over latents (MLA), causal; see below. One row per sequence, or chunks
        q_latent        (T, H, L), not scaled
        q_rope          (T, H, R), scaled already: mlx-lm's models multiply it by `scale` in their
                        own dtype, and undoing that would round it a second time
    gather_kv(k_pool, v_pool, tables) -> (keys, values)
        of a single sequence, each (1, K, positions, D), not computed: for what no op attends over;
        float32 of a quantised pool. Not on Metal
    read_kv(k_pool, v_pool, slots) -> (keys, values)
        what the pool holds there, bit-exact and already computed, so later writes do not change it:
        (slots, K, D), or quantised rows, which write_kv writes as they are. No step may be running
    settle(*pools)
        waits until all that was written to these pools is in them. Raises DeviceError
    copy_pages(k_pool, v_pool, sources, targets) -> (k_pool, v_pool)
        sources, targets  (N,) int32 page numbers; targets all different, none of them a source
    resize_pool(pool, num_pages, page_size) -> pool
        a computed pool of `num_pages` (at least 2) with the contents of the old one's first pages,
        bit-exact, new pages zeros. The argument must not be used again. No step may be running

        attention       a layer's scale, window and softcap
        sinks           None, or (H,): a logit per head that is only in the softmax's sum

A pool is one array per layer and side; its layout is the backend's own. For `paged_latent`, k_pool
holds each position's latent (1 head, L) and v_pool its rotated key (1 head, R), which all query heads
share. The latents are the values, too:

    score(row, head, position) = scale * q_latent . latent + q_rope . rotated key
    out(row, head)             = sum over positions of softmax(score) * latent

A pool of int8 is *quantised*: `new_pool(..., head_dim=D, dtype=int8)` has rows of D + 4 elements, D
values and the bytes of their scale. One array moves as one, so pages are copied, resized and read like
any others; with D = 128 a row takes 132 bytes instead of 256. For each slot and kv head, of keys and of
values:

    [ value_0, ..., value_{D-1} | scale: float32, 4 bytes ]        x is about value * scale
    scale = max |x| / 127, in float32         value = x / scale, rounded to the nearest, half to even
    no |x| of at least 2^-119: scale 0, values 0         NaN or infinity among x: scale NaN, values 0

Every backend writes these bytes. Attention takes what it reads for value * scale, computed in float32
and at most rounded to the queries' dtype. Queries have any float dtype. Latents are not quantised.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import NamedTuple, Protocol, TypeAlias

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from metal_kernels import quantised
from metal_kernels.tables import Plans, SequenceTables

FLOATS = (mx.float16, mx.bfloat16, mx.float32)
# Shapes that fit together and are not checked again: those of most steps.
_MAX_SHAPES = 1024

Slots = npt.NDArray[np.int32]
Projected: TypeAlias = Sequence[mx.array]  # rows of a layer's projections, see Heads
Norms: TypeAlias = "tuple[mx.array, mx.array] | None"  # weights (D,) of queries' norm and of keys'
# Of the norms of queries and keys; a third one of values' norm, which has no weight. None without norms.
Epsilon: TypeAlias = "tuple[float, float] | tuple[float, float, float] | None"
Shaped: TypeAlias = tuple[tuple[int, ...], mx.Dtype]  # an array's shape and dtype


class Attention(NamedTuple):
    """The attention parameters that distinguish layers of a shape. Part of the keys of plans."""

    scale: float  # multiplies the scores
    window: int | None = None  # positions a row sees, its own included
    softcap: float | None = None  # c in c * tanh(score / c)


class Heads(NamedTuple):
    """How rows of projections are cut into heads and processed. Part of the keys of plans.

    T rows of projections are (T, 1, width) each:

        three   queries num * step, keys num_kv * dim, values num_kv * dim
        one     the same side by side
    """

    num: int  # query heads
    num_kv: int
    dim: int
    rotated: int  # the first dimensions of a head, which RoPE turns
    is_traditional: bool = False  # a pair is two neighbours; else the same place of the two halves
    step: int = 0  # distance between queries: `dim`, or more if something else lies between
    epsilon: Epsilon = None

    @property
    def norms_values(self) -> bool:
        return self.epsilon is not None and len(self.epsilon) > 2

    @property
    def widths(self) -> tuple[int, int, int]:
        return self.num * (self.step or self.dim), self.num_kv * self.dim, self.num_kv * self.dim


class LayerShape(NamedTuple):
    """The properties for which a backend may refuse a layer."""

    key_dim: int
    value_dim: int
    dtype: mx.Dtype  # dtype of the computation
    is_latent: bool = False  # attends by paged_latent: key_dim is L, value_dim is R
    is_quantised: bool = False


class Backend(Protocol):
    """An implementation of the ops. See the module's docstring for shapes."""

    name: str
    # Whether a write keeps the pool's buffer even while an earlier step is still being computed.
    # If not, a step must end before the next one starts, or mlx copies the whole pool for each
    # layer (measured: 82 ms instead of 0.09 ms for 131 MB).
    writes_in_place: bool
    # Whether write_kv, paged_decode and paged_prefill take rows also as models pass them, (T, heads, 1, D),
    # and return them so. An axis that is taken away or put back is a node more in a step's graph, four of a
    # layer's thirty on Metal, where the device may wait for the graph.
    takes_model_rows: bool

    def new_pool(
        self, num_pages: int, kv_heads: int, page_size: int, head_dim: int, dtype: mx.Dtype
    ) -> mx.array: ...

    def write_kv(
        self,
        keys: mx.array,
        values: mx.array,
        k_pool: mx.array,
        v_pool: mx.array,
        slots: Slots,
        plans: Plans | None = None,
    ) -> tuple[mx.array, mx.array]: ...

    def rotate_and_write(
        self,
        projected: Projected,
        turns: mx.array,
        heads: Heads,
        norms: Norms,
        pools: tuple[mx.array, mx.array],
        slots: Slots,
        plans: Plans | None = None,
    ) -> tuple[mx.array, tuple[mx.array, mx.array]]: ...

    def read_kv(
        self, k_pool: mx.array, v_pool: mx.array, slots: Slots
    ) -> tuple[mx.array, mx.array]: ...

    def paged_decode(
        self,
        queries: mx.array,
        k_pool: mx.array,
        v_pool: mx.array,
        tables: SequenceTables,
        attention: Attention,
        sinks: mx.array | None = None,
    ) -> mx.array: ...

    def paged_prefill(
        self,
        queries: mx.array,
        k_pool: mx.array,
        v_pool: mx.array,
        tables: SequenceTables,
        attention: Attention,
        sinks: mx.array | None = None,
    ) -> mx.array: ...

    def paged_latent(
        self,
        q_latent: mx.array,
        q_rope: mx.array,
        k_pool: mx.array,
        v_pool: mx.array,
        tables: SequenceTables,
        *,
        scale: float,
    ) -> mx.array: ...

    def gather_kv(
        self, k_pool: mx.array, v_pool: mx.array, tables: SequenceTables
    ) -> tuple[mx.array, mx.array]: ...

    def copy_pages(
        self,
        k_pool: mx.array,
        v_pool: mx.array,
        sources: Slots,
        targets: Slots,
        page_size: int,
    ) -> tuple[mx.array, mx.array]: ...

    def settle(self, *pools: mx.array) -> None: ...

    def resize_pool(self, pool: mx.array, num_pages: int, page_size: int) -> mx.array: ...


def shapes_of(
    rows: mx.array, first: mx.array, second: mx.array, last: mx.array | None
) -> tuple[Shaped, Shaped, Shaped, Shaped | None]:
    """Key of an op's plan, besides the tables."""
    return (
        (rows.shape, rows.dtype),
        (first.shape, first.dtype),
        (second.shape, second.dtype),
        None if last is None else (last.shape, last.dtype),
    )


def check_attention(
    queries: mx.array,
    k_pool: mx.array,
    v_pool: mx.array,
    tables: SequenceTables,
    attention: Attention,
    sinks: mx.array | None = None,
) -> None:
    """Raises ValueError for inconsistent arguments."""
    num_slots = _slots_attended(*shapes_of(queries, k_pool, v_pool, sinks), attention)
    if len(queries) != tables.num_rows:
        raise ValueError(f"queries have {len(queries)} rows, the tables describe {tables.num_rows}")
    if (tables.highest_page + 1) * tables.page_size > num_slots:
        raise ValueError(
            f"page {tables.highest_page} of {tables.page_size} slots is outside the pool, which "
            f"has {num_slots} slots"
        )


@lru_cache(maxsize=_MAX_SHAPES)
def _slots_attended(
    queries: Shaped, k_pool: Shaped, v_pool: Shaped, sinks: Shaped | None, attention: Attention
) -> int:
    """Return the pool's slots. Raises ValueError for inconsistent shapes."""
    shape, dtype = queries
    if len(shape) != 3:
        raise ValueError(f"queries must have 3 dimensions, got {shape}")
    _, heads, head_dim = shape
    kv_heads, key_dim, num_slots = _pool_shape(*k_pool)
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads do not divide into {kv_heads} kv heads")
    if head_dim != key_dim:
        raise ValueError(f"queries have head dimension {head_dim}, the pool's keys {key_dim}")
    if k_pool[0][:-1] != v_pool[0][:-1] or k_pool[1] != v_pool[1]:
        raise ValueError(
            f"pools {k_pool[0]} of {k_pool[1]} and {v_pool[0]} of {v_pool[1]} do not belong together"
        )
    _check_dtype(dtype, "queries", k_pool[1])
    _, window, softcap = attention
    if window is not None and window < 1:
        raise ValueError(f"a window must be at least 1, got {window}")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"a softcap must be above 0, got {softcap}")
    if sinks is not None and sinks[0] != (heads,):
        raise ValueError(f"sinks must be ({heads},), got {sinks[0]}")
    return num_slots


def check_latent(
    q_latent: mx.array,
    q_rope: mx.array,
    k_pool: mx.array,
    v_pool: mx.array,
    tables: SequenceTables,
) -> None:
    """Raises ValueError for inconsistent arguments."""
    if k_pool.dtype == quantised.DTYPE:
        raise ValueError("latents are not quantised: their pools have the queries' dtype")
    check_attention(q_latent, k_pool, v_pool, tables, Attention(1.0))
    kv_heads, rope_dim, _ = _pool_shape(v_pool.shape, v_pool.dtype)
    if kv_heads != 1:
        raise ValueError(f"latents have 1 kv head, the pool has {kv_heads}")
    if q_rope.shape != (*q_latent.shape[:2], rope_dim) or q_rope.dtype != q_latent.dtype:
        raise ValueError(
            f"q_rope is {tuple(q_rope.shape)} of {q_rope.dtype}; these latents and this pool take "
            f"{(*q_latent.shape[:2], rope_dim)} of {q_latent.dtype}"
        )


def check_decode(tables: SequenceTables) -> None:
    """Raises ValueError if a sequence has several rows."""
    if tables.num_rows != len(tables):
        raise ValueError("paged_decode takes one row per sequence")


def check_gather(tables: SequenceTables) -> None:
    """Raises ValueError if there are several sequences."""
    if len(tables) != 1:
        raise ValueError("gather_kv takes one sequence")


def check_write(
    keys: mx.array, values: mx.array, k_pool: mx.array, v_pool: mx.array, slots: Slots
) -> None:
    """Raises ValueError for inconsistent arguments.

    Does not check that the slots differ.
    """
    if slots.ndim != 1 or slots.dtype != np.int32:
        raise ValueError(f"slots must be one row of int32, got {slots.shape} of {slots.dtype}")
    num_slots = _slots_written(*shapes_of(keys, values, k_pool, v_pool), len(slots))
    # Unsigned, a negative one is above all others.
    if len(slots) and int(slots.view(np.uint32).max()) >= num_slots:
        raise ValueError(f"slots must be in 0..{num_slots - 1}")


@lru_cache(maxsize=_MAX_SHAPES)
def _slots_written(
    keys: Shaped, values: Shaped, k_pool: Shaped, v_pool: Shaped, num_rows: int
) -> int:
    """Return the pools' slots. Raises ValueError for inconsistent shapes."""
    for name, (rows, dtype), pool in (("keys", keys, k_pool), ("values", values, v_pool)):
        kv_heads, head_dim, _ = _pool_shape(*pool)
        if dtype == quantised.DTYPE:
            head_dim = pool[0][-1]
        if rows != (num_rows, kv_heads, head_dim):
            raise ValueError(
                f"{name} are {rows}; {num_rows} slots of this pool take "
                f"({num_rows}, {kv_heads}, {head_dim})"
            )
        if dtype != quantised.DTYPE or dtype != pool[1]:
            _check_dtype(dtype, name, pool[1])
    return min(_pool_shape(*pool)[2] for pool in (k_pool, v_pool))


def check_copy(
    k_pool: mx.array, v_pool: mx.array, sources: Slots, targets: Slots, page_size: int
) -> None:
    """Raises ValueError for pages that cannot be copied."""
    if len(sources) != len(targets):
        raise ValueError(
            f"{len(sources)} sources and {len(targets)} targets do not belong together"
        )
    pages = np.concatenate([sources, targets])
    num_pages = (
        min(_pool_shape(pool.shape, pool.dtype)[2] for pool in (k_pool, v_pool)) // page_size
    )
    if len(pages) and not 0 <= int(pages.min()) <= int(pages.max()) < num_pages:
        raise ValueError(f"pages must be in 0..{num_pages - 1}")
    if len(np.unique(targets)) < len(targets) or np.intersect1d(sources, targets).size:
        raise ValueError("targets must be all different, and none of them a source")


def _pool_shape(shape: tuple[int, ...], dtype: mx.Dtype) -> tuple[int, int, int]:
    """(kv heads, head dimension, slots), which every layout has at the same axes.

    The dimension may be 0: MiniMax M3 keeps keys for choosing blocks, and no values beside them.
    """
    *pages, kv_heads, num_slots, width = shape
    return kv_heads, quantised.head_dim_of(width, dtype), prod(pages) * num_slots


def _check_dtype(rows: mx.Dtype, name: str, pool: mx.Dtype) -> None:
    """Raises ValueError if dtypes differ. A quantised pool accepts every float dtype."""
    fits = rows in FLOATS if pool == quantised.DTYPE else rows == pool
    if not fits:
        raise ValueError(f"{name} are {rows}, the pool is {pool}")

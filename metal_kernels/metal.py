"""MetalBackend: the ops as Metal kernels over pools that are written in place.

Owns the order of kernels (`fences.py`) and knows their texts only by their buffers (`kernels.py`).
Pools are (num_pages, kv_heads, page_size, row): a page's tile of one head is contiguous.

In-place writes are correct under these rules; breaking one corrupts data silently:
a kernel that uses a pool binds the fences of the kernels it must follow; a pool is one
row-contiguous array, passed whole and never replaced (MLX binds its `first_page`); inside mx.compile only what
`recording` returns may run, with pools and fences that are arguments; no other op of mlx reads a pool while a
step is running (call `settle()` first).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from copy import copy

import mlx.core as mx
import numpy as np

from metal_kernels import kernels, quantised
from metal_kernels.copied_attention import CopiedAttention
from metal_kernels.dispatches import Dispatches, with_sinks
from metal_kernels.fences import Fences
from metal_kernels.kernels import Dispatch, Factory, Kernels
from metal_kernels.latents import LATENT_DIMS, LatentAttention
from metal_kernels.limits import HEAD_DIMS, PAGE_SIZES
from metal_kernels.long_chunks import ChunkRun, runs_of
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
    check_write,
    shapes_of,
)
from metal_kernels.plans import (
    WritePlan,
    upload,
)
from metal_kernels.reading import evaluate
from metal_kernels.recording import StepInputs
from metal_kernels.resizing import copy_start
from metal_kernels.rotary import RotatedWrites
from metal_kernels.tables import SequenceTables

DTYPES = FLOATS


class MetalBackend:
    """The ops as kernels that `factory` makes."""

    name = "metal"
    writes_in_place = True
    takes_model_rows = True

    def __init__(self, factory: Factory, *, uses_matrices: bool = True) -> None:
        """uses_matrices: for decodes with many query heads per kv head; False: by one kernel for all"""
        self._kernels = Kernels(factory)
        self._dispatches = Dispatches(self._kernels, uses_matrices=uses_matrices)
        self._latents = LatentAttention(self._kernels)
        self.fences = Fences()
        self._copied = CopiedAttention(self._kernels, self.fences)
        self._rotated = RotatedWrites(self._kernels)
        self._slots: Slots | None = None  # of the step's rows
        self._moves: WritePlan | None = None  # of these slots
        self._writes: dict[Hashable, tuple[Dispatch, ...]] = {}  # of these slots, by shape
        self._rotations: dict[Hashable, Dispatch] = {}  # likewise

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
        self, keys: mx.array, values: mx.array, k_pool: mx.array, v_pool: mx.array, slots: Slots
    ) -> tuple[mx.array, mx.array]:
        for write in self._writes_of(keys, values, k_pool, v_pool, slots):
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
    ) -> tuple[mx.array, tuple[mx.array, mx.array]]:
        k_pool, v_pool = pools
        write = self._rotation_of(projected, turns, heads, norms, k_pool, v_pool, slots)
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
        _check_pools(k_pool, v_pool, may_be_latent=True)
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
        _check_pools(k_pool, v_pool, may_be_latent=True)
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
            check_attention(_rows(queries), k_pool, v_pool, tables, attention, sinks)
            _check_pools(k_pool, v_pool)
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
            """The chunks, with the tile kernel of those that MLX's attention, which has no softcap, does
            not take."""
            check_attention(_rows(queries), k_pool, v_pool, tables, attention, sinks)
            _check_pools(k_pool, v_pool)
            if attention.softcap is None:
                shape = k_pool.shape[1], queries.shape[-1], queries.dtype
                runs = runs_of(tables, *shape, attention.window)
            else:
                runs = (ChunkRun(tables, 0, tables.num_rows, None),)
            return [
                (run, self._dispatches.prefill(rows_of(run), k_pool, run.tables, attention, sinks))
                if run.gathered is None
                else (run, None)
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
                output = self._copied.attend(
                    rows, k_pool, v_pool, run.tables, run.gathered, attention, sinks
                )
            outputs.append(output)
        return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)

    def attend_tiles(
        self,
        queries: mx.array,
        k_pool: mx.array,
        v_pool: mx.array,
        tables: SequenceTables,
        attention: Attention,
        sinks: mx.array | None = None,
    ) -> mx.array:
        """As `paged_prefill`, by the tile kernel, which reads the pages themselves."""
        attend = tables.plan(
            ("prefill", *self._key(queries, k_pool, v_pool, attention, sinks)),
            lambda: self._dispatches.prefill(queries, k_pool, tables, attention, sinks),
        )
        return self._by_tiles(attend, queries, k_pool, v_pool, sinks)

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
            if (reason := refusal(*_dims(k_pool, v_pool)[:3], is_latent=True)) is not None:
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
        self, step: StepInputs, k_pools: Sequence[mx.array], fences: Sequence[list[mx.array]]
    ) -> MetalBackend:
        """The same kernels for one step of decodes, with fences of their own, which begin with these."""
        other = copy(self)
        other.fences = Fences()
        other._copied = CopiedAttention(other._kernels, other.fences)
        for pool in k_pools:
            other.fences.add(pool)
        other.fences.resume(k_pools, fences)
        other._begin(step.slots, step.plan)
        return other

    def gather_kv(
        self,
        k_pool: mx.array,  # noqa: ARG002
        v_pool: mx.array,  # noqa: ARG002
        tables: SequenceTables,  # noqa: ARG002
    ) -> tuple[mx.array, mx.array]:
        """Raises ValueError: plain arrays of a pool that is written in place need a copy each."""
        raise ValueError('the Metal backend gathers no sequence; attention_backend="cpu" does')

    # ---- plans: made once per step for the layers of a shape

    def _key(
        self,
        queries: mx.array,
        k_pool: mx.array,
        v_pool: mx.array,
        attention: Attention,
        sinks: mx.array | None,
    ) -> tuple[Hashable, ...]:
        """What a plan depends on, besides the tables."""
        of_sinks = None if sinks is None else (sinks.shape, sinks.dtype)
        kind = self.fences.kind(k_pool, v_pool)
        return attention, kind, queries.shape, queries.dtype, of_sinks

    def _writes_of(
        self, keys: mx.array, values: mx.array, k_pool: mx.array, v_pool: mx.array, slots: Slots
    ) -> tuple[Dispatch, ...]:
        if slots is not self._slots:
            self._begin(slots)
        key = shapes_of(keys, values, k_pool, v_pool)
        writes = self._writes.get(key)
        if writes is None:
            check_write(_rows(keys), _rows(values), k_pool, v_pool, slots)
            _check_pools(k_pool, v_pool, may_be_latent=True)
            plan = self.moves_of(slots, k_pool.shape[2])
            if keys.dtype != k_pool.dtype:
                rows = WritePlan.of_rows(slots) if len(plan.pages) else plan
                quantise = self._dispatches.quantise(
                    keys.dtype, rows.tokens_on_device, len(slots), k_pool
                )
                self._writes[key] = (quantise,)
                return self._writes[key]
            kinds = (
                (kernels.WRITE_KV_PAGES, plan.pages_on_device, len(plan.pages)),
                (kernels.WRITE_KV_TOKENS, plan.tokens_on_device, len(plan.tokens)),
            )
            writes = tuple(
                self._dispatches.move(*kind, k_pool, v_pool) for kind in kinds if kind[2]
            )
            self._writes[key] = writes
        return writes

    def _rotation_of(
        self,
        projected: Projected,
        turns: mx.array,
        heads: Heads,
        norms: Norms,
        k_pool: mx.array,
        v_pool: mx.array,
        slots: Slots,
    ) -> Dispatch:
        if slots is not self._slots:
            self._begin(slots)
        key = (heads, len(projected), self.fences.kind(k_pool, v_pool))  # all rows have one dtype
        found = self._rotations.get(key)
        if found is None:
            _check_pools(k_pool, v_pool)
            written = mx.zeros((len(slots), heads.num_kv, heads.dim), projected[0].dtype)
            check_write(written, written, k_pool, v_pool, slots)
            moves = self._moves
            if moves is None or len(moves.pages):
                moves = WritePlan.of_rows(slots)
            found = self._rotations[key] = self._rotated.dispatch(
                projected, turns, heads, norms, moves.tokens_on_device, k_pool
            )
        return found

    def moves_of(self, slots: Slots, page_size: int) -> WritePlan:
        """Made once, as every layer passes the same array of slots."""
        if slots is not self._slots:
            self._begin(slots)
        if self._moves is None:
            self._moves = WritePlan.of(slots, page_size)
        return self._moves

    def _begin(self, slots: Slots, moves: WritePlan | None = None) -> None:
        self._slots, self._moves, self._writes, self._rotations = slots, moves, {}, {}

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


def _rows(array: mx.array) -> mx.array:
    """(T, heads, D), also of rows as models pass them; kernels see no difference."""
    return array.squeeze(2) if array.ndim == 4 and array.shape[2] == 1 else array


def refusal(
    key_dim: int,
    value_dim: int,
    dtype: mx.Dtype,
    is_latent: bool = False,
    is_quantised: bool = False,
) -> str | None:
    """Why the kernels cannot run a layer of this shape, or None.

    dtype: that it computes in
    """
    if dtype not in DTYPES:
        return f"the Metal kernels take float16, bfloat16 and float32, got {dtype}"
    if is_latent and is_quantised:
        return "the Metal kernels take no latents in 8 bits"
    if is_latent:
        if (key_dim, value_dim) in LATENT_DIMS:
            return None
        return (
            f"the Metal kernels take latents and rotated keys of dimensions {LATENT_DIMS}, got "
            f'{(key_dim, value_dim)}; attention_backend="cpu" takes any'
        )
    if key_dim != value_dim:
        return (
            f"the Metal kernels take keys and values of one head dimension, got {key_dim} and "
            f'{value_dim}; attention_backend="cpu" takes any'
        )
    if key_dim not in HEAD_DIMS:
        return (
            f"the Metal kernels take head dimensions {HEAD_DIMS}, got {key_dim}; "
            'attention_backend="cpu" takes any'
        )
    return None


def _check_pools(k_pool: mx.array, v_pool: mx.array, *, may_be_latent: bool = False) -> None:
    key_dim, value_dim, dtype, is_quantised = _dims(k_pool, v_pool)
    reason = refusal(key_dim, value_dim, dtype)
    if reason is not None and not (
        may_be_latent and refusal(key_dim, value_dim, dtype, True, is_quantised) is None
    ):
        raise ValueError(reason)
    if k_pool.shape[:-1] != v_pool.shape[:-1] or k_pool.dtype != v_pool.dtype:
        raise ValueError("the pools of keys and of values must be alike")


def _dims(k_pool: mx.array, v_pool: mx.array) -> tuple[int, int, mx.Dtype, bool]:
    """Dimensions of keys and values, a dtype to compute in, whether they are quantised."""
    is_quantised = k_pool.dtype == quantised.DTYPE
    dims = (
        quantised.head_dim_of(k_pool.shape[-1], k_pool.dtype),
        quantised.head_dim_of(v_pool.shape[-1], v_pool.dtype),
    )
    return *dims, mx.float32 if is_quantised else k_pool.dtype, is_quantised

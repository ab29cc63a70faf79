"""Checks the ops of a backend on this machine against exact answers.

`check_ops` compares every op with `numpy_attention`, computed in float32 from the same numbers: the
error is the op's own rounding. An op that the device refuses is a result, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from metal_kernels import quantised
from metal_kernels.few_rows import BITS, GROUP_SIZES, PACKS, ROWS, Quantised
from metal_kernels.latents import LATENT_DIMS
from metal_kernels.limits import HEAD_DIMS
from metal_kernels.metal import DTYPES, MetalBackend
from metal_kernels.numpy_attention import Floats, attend, in_8_bits, unpacked
from metal_kernels.ops import Attention, Backend, Heads
from metal_kernels.reading import read
from metal_kernels.replay import DeltaRows, PlainReplay, Readout, Rows, Spans, SsmRows
from metal_kernels.rounding import TOLERANCES, row_error
from metal_kernels.tables import IntArray, SequenceTables

# Of rows in 8 bits: a number on the border of two values may be rounded to either.
_ROUNDING = 1 / 126
# What mlx raises for a text that Apple's compiler refuses, and for too many threads.
REFUSALS = (RuntimeError, ValueError)

_PAGE_SIZE = 32
_KV_HEADS = 2
_GROUP = 3
_LARGE_GROUP = 8  # decodes of larger groups have a kernel of their own
_LATENT_HEADS = 20
# (tokens before the chunk, rows of the chunk)
_DECODES = ((0, 1), (31, 1), (300, 1))
_CHUNKS = ((0, 33), (20, 40))
_DRAFT_END, _DRAFT_ROWS = 300, 3  # positions of a draft's last row, and rows
# A product of few rows: results, and numbers of a row for each dimension of a head.
_RESULTS, _WIDTH_OF_A_HEAD = 8, 8
# Of recurrent layers: numbers of a state for each value, a draft of three tokens after a decode, and two of them right.
_RECURRENT = 128
_DRAFTED, _ACCEPTED = Spans([(1, 0, 1), (0, 1, 4)]), Spans([(0, 1, 3), (1, 0, 1)])


@dataclass(frozen=True, slots=True)
class OpCheck:
    """The error of one op, or why it does not run.

    Errors are relative to the largest value, for attention to that of each row.
    """

    op: str
    dtype: mx.Dtype
    head_dim: int
    error: float
    tolerance: float  # 0 for writes and copies, but for writes in 8 bits
    refusal: str | None = None  # the whole message
    is_quantised: bool = False  # the pools; `dtype` is that of rows and queries

    @property
    def is_right(self) -> bool:
        return self.refusal is None and self.error <= self.tolerance  # False for NaN


def check_ops(
    backend: Backend,
    head_dims: Sequence[int] = HEAD_DIMS,
    latent_dims: Sequence[tuple[int, int]] = LATENT_DIMS,
) -> Iterator[OpCheck]:
    """Check every op in every dtype and head dimension, and over pools in 8 bits.

    Yields each result at once.
    """
    for dtype in DTYPES:
        for head_dim in head_dims:
            yield from _check(backend, dtype, head_dim)
        for dims in latent_dims:
            yield _check_latents(backend, dtype, *dims)
        for head_dim in head_dims:
            yield from _check(backend, dtype, head_dim, is_quantised=True)


def _check_latents(backend: Backend, dtype: mx.Dtype, latent_dim: int, rope_dim: int) -> OpCheck:
    """Check decodes and chunks over latents; `_check` has checked the writes."""
    error, refusal = float("nan"), None
    try:
        error = max(
            _latent_error(backend, dtype, (latent_dim, rope_dim), sequences)
            for sequences in (_DECODES, _CHUNKS)
        )
    except REFUSALS as refused:
        refusal = str(refused)
    return OpCheck("paged_latent", dtype, latent_dim, error, _tolerance(backend, dtype), refusal)


def _latent_error(
    backend: Backend,
    dtype: mx.Dtype,
    dims: tuple[int, int],
    sequences: Sequence[tuple[int, int]],
) -> float:
    tables = _tables(sequences)
    slots = np.arange(tables.page_tables.size * _PAGE_SIZE, dtype=np.int32)
    k_pool, v_pool = (
        backend.new_pool(slots.size // _PAGE_SIZE, 1, _PAGE_SIZE, dim, dtype) for dim in dims
    )
    latents, keys = (_draw((len(slots), 1, dim), dtype, seed) for seed, dim in enumerate(dims))
    k_pool, v_pool = backend.write_kv(latents, keys, k_pool, v_pool, slots)
    q_latent, q_rope = (
        _draw((tables.num_rows, _LATENT_HEADS, dim), dtype, 2 + seed)
        for seed, dim in enumerate(dims)
    )
    # As if both were one query and one key, with the scale of both dimensions.
    scale = sum(dims) ** -0.5
    q_rope = (q_rope * scale).astype(dtype)
    output = backend.paged_latent(q_latent, q_rope, k_pool, v_pool, tables, scale=scale)
    ours, asked_latent, asked_rope = map(_floats, (output, q_latent, q_rope))
    queries = np.concatenate([asked_latent, asked_rope / np.float32(scale)], axis=2)
    whole = np.concatenate([_floats(latents), _floats(keys)], axis=2)
    expected = []
    for sequence, first, end in tables.queries():
        seen = tables.slots(sequence, np.arange(int(tables.context_lens[sequence])))
        expected.append(attend(queries[first:end], whole[seen], whole[seen][:, :, : dims[0]]))
    right = np.concatenate(expected)
    return row_error(ours, right)


def _tolerance(backend: Backend, dtype: mx.Dtype) -> float:
    """Return the tolerance, doubled for mlx's attention on a CPU.

    That rounds probabilities to the dtype as well: in float16 a row of 192 was 4.1 units off.
    """
    return TOLERANCES[dtype] * (1 if backend.name == "metal" else 2)


def _check(
    backend: Backend, dtype: mx.Dtype, head_dim: int, *, is_quantised: bool = False
) -> Iterator[OpCheck]:
    is_written = True
    errors = dict(_ERRORS)
    if isinstance(backend, MetalBackend):
        errors |= _METAL_ERRORS if is_quantised else _METAL_ERRORS | _OTHER_ERRORS
    for op, error_of in errors.items():
        error, refusal = float("nan"), None
        if is_written:
            try:
                error = error_of(_Written.draw(backend, dtype, head_dim, is_quantised))
            except REFUSALS as refused:
                refusal = str(refused)
        else:
            refusal = "not checked, because write_kv does not run"
        is_written = is_written and not (op == "write_kv" and refusal)
        tolerance = 0.0 if op in ("write_kv", "copy_pages") else _tolerance(backend, dtype)
        if is_quantised and op in ("write_kv", "rotate_and_write"):
            tolerance = _ROUNDING
        yield OpCheck(op, dtype, head_dim, error, tolerance, refusal, is_quantised)


@dataclass(frozen=True, slots=True)
class _Written:
    """Random keys and values, and the pools that they were written to."""

    backend: Backend
    keys: mx.array  # (tokens, kv_heads, head_dim)
    values: mx.array
    slots: IntArray
    pools: tuple[mx.array, mx.array]

    @property
    def is_quantised(self) -> bool:
        return self.pools[0].dtype == quantised.DTYPE

    def held(self) -> tuple[Floats, Floats]:
        """Keys and values that the pools should hold."""
        keys, values = _floats(self.keys), _floats(self.values)
        return (in_8_bits(keys), in_8_bits(values)) if self.is_quantised else (keys, values)

    @classmethod
    def draw(cls, backend: Backend, dtype: mx.Dtype, head_dim: int, is_quantised: bool) -> _Written:
        """Draw keys and values, and write them to new pools.

        Every op gets pools of its own: an array whose computation failed poisons what follows.
        """
        most = max(_tables(sequences).page_tables.size for sequences in (_DECODES, _CHUNKS))
        slots = np.arange(most * _PAGE_SIZE, dtype=np.int32)[:-3]  # pages, and rows
        keys, values = (_draw((len(slots), _KV_HEADS, head_dim), dtype, s) for s in (1, 2))
        shape = (most + 1, _KV_HEADS, _PAGE_SIZE, head_dim)
        pool_dtype = quantised.DTYPE if is_quantised else dtype
        k_pool, v_pool = (backend.new_pool(*shape, pool_dtype) for _ in range(2))
        pools = backend.write_kv(keys, values, k_pool, v_pool, slots)
        return cls(backend, keys, values, slots, pools)


def _write_error(written: _Written) -> float:
    held = written.backend.read_kv(*written.pools, written.slots)
    if not written.is_quantised:
        return _largest_difference(held, (written.keys, written.values))
    differences = [
        np.abs(unpacked(read(rows)) - wanted) / np.abs(wanted).max(axis=-1, keepdims=True)
        for rows, wanted in zip(held, written.held(), strict=True)
    ]
    return float(np.max(differences))


def _copy_error(written: _Written) -> float:
    # The last page, which holds nothing.
    target = len(written.slots) // _PAGE_SIZE + 1
    # The last one that is full.
    source = target - 2
    moves = np.array([source], np.int32), np.array([target], np.int32)
    pools = written.backend.copy_pages(*written.pools, *moves, _PAGE_SIZE)
    ours, theirs = (written.backend.read_kv(*pools, _slots_of(page)) for page in (target, source))
    return _largest_difference(ours, theirs)


def _decode_error(written: _Written) -> float:
    return _attention_error(written, _tables(_DECODES), written.backend.paged_decode)


def _grouped_error(written: _Written) -> float:
    op = written.backend.paged_decode
    return _attention_error(written, _tables(_DECODES), op, _LARGE_GROUP)


def _draft_error(written: _Written, group: int = _GROUP) -> float:
    """Error of the rows of one draft, whose pages are read together where registers hold them."""
    pages = np.arange(-(-_DRAFT_END // _PAGE_SIZE), dtype=np.int32)
    tables = SequenceTables(
        page_tables=np.tile(pages, (_DRAFT_ROWS, 1)),
        context_lens=np.arange(_DRAFT_ROWS, dtype=np.int32) + _DRAFT_END - _DRAFT_ROWS + 1,
        query_starts=np.arange(_DRAFT_ROWS + 1, dtype=np.int32),
        page_size=_PAGE_SIZE,
    )
    return _attention_error(written, tables, written.backend.paged_decode, group)


def _grouped_draft_error(written: _Written) -> float:
    return _draft_error(written, _LARGE_GROUP)


def _product_error(written: _Written) -> float:
    """Error of products of few rows with weights of 4 and 8 bits."""
    backend, dtype = written.backend, written.keys.dtype
    assert isinstance(backend, MetalBackend)
    width = _WIDTH_OF_A_HEAD * written.keys.shape[-1]
    rows = _draw((ROWS[-1], width), dtype, 7)
    errors = []
    for bits in BITS:
        packed, scales, biases = mx.quantize(_draw((_RESULTS, width), dtype, 8), bits=bits)
        weights = Quantised(packed, scales, biases, GROUP_SIZES[1], bits)
        exact = mx.dequantize(packed, _as_floats(scales), _as_floats(biases), bits=bits)
        right = read(_as_floats(rows)) @ read(exact).T
        for packs in PACKS:
            ours = _floats(backend.few_rows.product(rows, weights, packs))
            errors.append(row_error(ours[:, None], right[:, None]))
    return max(errors)


def _delta_error(written: _Written) -> float:
    """Error of rows of drafts through a gated delta net with gates of heads, and of numbers."""
    dtype, errors = written.keys.dtype, []
    shape = _DRAFTED.num_rows, _KV_HEADS, _RECURRENT
    for gates in (shape[:2], shape):
        rows = DeltaRows(
            _draw(shape, dtype, 9) * _RECURRENT**-0.5,
            _draw(shape, dtype, 10),
            mx.sigmoid(_draw(gates, mx.float32, 11)),
            mx.sigmoid(_draw(shape[:2], dtype, 12)),
        )
        errors.append(_replay_error(written, rows, (_draw(shape, dtype, 13),)))
    return max(errors)


def _ssm_error(written: _Written) -> float:
    """Error of rows of drafts through a state-space layer."""
    dtype, shape = written.keys.dtype, (_DRAFTED.num_rows, _KV_HEADS, _RECURRENT)
    steps = mx.sigmoid(_draw(shape[:2], mx.float32, 9))
    rows = SsmRows(_draw(shape, dtype, 10), steps, mx.zeros(_KV_HEADS), _draw(shape, dtype, 11))
    return _replay_error(written, rows, (_draw(shape, dtype, 12), mx.ones(_KV_HEADS, dtype)))


def _replay_error(written: _Written, rows: Rows, readout: Readout) -> float:
    """Error of the outputs and states of a decode, and of a draft that is right in part."""
    assert isinstance(written.backend, MetalBackend)
    state = _draw((2, _KV_HEADS, _RECURRENT, _RECURRENT), mx.float32, 14)
    kernels, plain = written.backend.replay, PlainReplay()
    pairs = [
        (ops.outputs(rows, readout, state, _DRAFTED), ops.states(rows, state, _ACCEPTED))
        for ops in (kernels, plain)
    ]
    return max(row_error(_floats(ours), _floats(right)) for ours, right in zip(*pairs, strict=True))


def _prefill_error(written: _Written) -> float:
    return _attention_error(written, _tables(_CHUNKS), written.backend.paged_prefill)


def _attention_error(
    written: _Written,
    tables: SequenceTables,
    op: Callable[..., mx.array],
    group: int = _GROUP,
) -> float:
    head_dim = written.keys.shape[-1]
    queries = _draw((tables.num_rows, _KV_HEADS * group, head_dim), written.keys.dtype, 3)
    output = op(queries, *written.pools, tables, Attention(head_dim**-0.5))
    ours, rows = map(_floats, (output, queries))
    keys, values = written.held()
    expected = []
    for sequence, first, end in tables.queries():
        context = int(tables.context_lens[sequence])
        slots = tables.slots(sequence, np.arange(context))
        expected.append(attend(rows[first:end], keys[slots], values[slots]))
    right = np.concatenate(expected)
    return row_error(ours, right)


def _rotation_error(written: _Written) -> float:
    """Error of rotated queries, keys and values of a few rows, without norms.

    Keys and values are compared as the pools hold them.
    """
    dtype, head_dim = written.keys.dtype, written.keys.shape[-1]
    slots = written.slots[:: _PAGE_SIZE + 1]
    heads = Heads(_KV_HEADS * _GROUP, _KV_HEADS, head_dim, head_dim // 2)
    projected = [
        _draw((len(slots), 1, width), dtype, seed) for seed, width in enumerate(heads.widths, 4)
    ]
    angles = np.outer(np.arange(len(slots)), 1 / np.arange(1, head_dim // 4 + 1))
    cosine, sine = (turn(angles).astype(np.float32)[:, None] for turn in (np.cos, np.sin))
    turns = mx.array(np.concatenate([cosine, sine], axis=-1))[:, :, None]
    queries, pools = written.backend.rotate_and_write(
        projected, turns, heads, None, written.pools, slots
    )
    held = [
        unpacked(read(rows)) if written.is_quantised else _floats(rows)
        for rows in written.backend.read_kv(*pools, slots)
    ]
    right = [_floats(rows).reshape(len(slots), -1, head_dim) for rows in projected]
    for rows in right[:2]:
        first, second = np.split(rows[..., : head_dim // 2].copy(), 2, axis=-1)
        turned = first * cosine - second * sine, first * sine + second * cosine
        rows[..., : head_dim // 2] = np.concatenate(turned, axis=-1)
    ours = [_floats(queries)[:, :, 0], *held]
    return max(row_error(mine, other) for mine, other in zip(ours, right, strict=True))


_ERRORS: dict[str, Callable[[_Written], float]] = {
    "write_kv": _write_error,
    "copy_pages": _copy_error,
    "rotate_and_write": _rotation_error,
    "paged_decode": _decode_error,
    "grouped_decode": _grouped_error,
    "paged_prefill": _prefill_error,
}
# Of ops that have kernels of their own on Metal alone.
_METAL_ERRORS: dict[str, Callable[[_Written], float]] = {
    "draft_decode": _draft_error,
    "grouped_drafts": _grouped_draft_error,
}
# Of ops on other arrays than pools.
_OTHER_ERRORS: dict[str, Callable[[_Written], float]] = {
    "qmv_rows": _product_error,
    "replay_delta": _delta_error,
    "replay_ssm": _ssm_error,
}


def _floats(array: mx.array) -> Floats:
    return read(_as_floats(array))


def _as_floats(array: mx.array) -> mx.array:
    return array.astype(mx.float32)


def _slots_of(page: int) -> IntArray:
    return page * _PAGE_SIZE + np.arange(_PAGE_SIZE, dtype=np.int32)


def _largest_difference(ours: Sequence[mx.array], theirs: Sequence[mx.array]) -> float:
    """The largest difference; NaN if either side has one."""
    differences = (
        np.abs(read((mine - other).astype(mx.float32)))
        for mine, other in zip(ours, theirs, strict=True)
    )
    return float(np.max([difference.max() for difference in differences]))


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

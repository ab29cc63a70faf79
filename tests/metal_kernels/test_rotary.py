"""One kernel normalises, rotates and writes what a layer's projections are, as float64 numpy does."""

from __future__ import annotations

from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np
import pytest

from metal_kernels.limits import HEAD_DIMS, PAGE_SIZES
from metal_kernels.metal import DTYPES, MetalBackend
from metal_kernels.ops import Backend, Heads
from metal_kernels.plain import PlainBackend
from metal_kernels.quantised import row_width
from metal_kernels.reading import read
from metal_kernels.reference import ReferenceBackend
from tests.metal_kernels.oracle import quantised

POSITIONS = (0, 5, 77, 1, 4_000, 2)
NUM_PAGES = 4
_HEADS = Heads(4, 2, 64, 64)
UNITS = {mx.bfloat16: 2.0**-8, mx.float16: 2.0**-11, mx.float32: 2.0**-21}


@dataclass(frozen=True)
class Rotation:
    """What a layer's rows are, and where they are written."""

    heads: Heads = _HEADS
    dtype: mx.Dtype = mx.float32
    page_size: int = 16
    is_joined: bool = True
    is_quantised: bool = False

    def __str__(self) -> str:
        words = [f"d{self.heads.dim}r{self.heads.rotated}", str(self.dtype).rpartition(".")[2]]
        words += ["norms"] if self.heads.epsilon else []
        words += ["of values"] if self.heads.norms_values else []
        words += ["traditional"] if self.heads.is_traditional else []
        words += ["gated"] if self.heads.step > self.heads.dim else []
        words += [] if self.is_joined else ["three"]
        words += ["q8"] if self.is_quantised else []
        return "-".join([*words, f"page{self.page_size}"])

    @property
    def slots(self) -> np.ndarray:
        """Of each row, in pages of any order; the last one is the pool's last."""
        size = self.page_size
        return np.array([size + 1, 0, 3 * size - 1, size, 2 * size, NUM_PAGES * size - 1], np.int32)

    def projections(self) -> list[np.ndarray]:
        """Float64 of what the dtype holds."""
        draw = np.random.default_rng(self.heads.dim)
        rows = [draw.standard_normal((len(POSITIONS), 1, width)) for width in self.heads.widths]
        return [as_held(array, self.dtype) for array in rows]

    def norms(self) -> list[np.ndarray] | None:
        if self.heads.epsilon is None:
            return None
        draw = np.random.default_rng(9)
        return [as_held(1 + 0.3 * draw.standard_normal(self.heads.dim), self.dtype) for _ in "qk"]

    def angles(self) -> np.ndarray:
        """(rows, pairs): in float32, as RoPE computes them."""
        pairs = self.heads.rotated // 2
        frequencies = 10_000.0 ** (-np.arange(pairs, dtype=np.float32) / max(1, pairs))
        return np.array(POSITIONS, np.float32)[:, None] * frequencies.astype(np.float32)


def as_held(array: np.ndarray, dtype: mx.Dtype) -> np.ndarray:
    return read(mx.array(array.astype(np.float32)).astype(dtype).astype(mx.float32)).astype(float)


def turns_of(case: Rotation) -> mx.array:
    """Cosines and sines, where the two elements of each pair are."""
    if not case.heads.rotated:
        return mx.zeros(8)
    both = [np.cos(case.angles()), np.sin(case.angles())]
    join = np.stack(both, axis=-1) if case.heads.is_traditional else np.concatenate(both, axis=-1)
    return mx.array(join.astype(np.float32)).reshape(len(POSITIONS), 1, 1, -1)


def expected(case: Rotation) -> list[np.ndarray]:
    """Queries, keys and values, (rows, heads, dim)."""
    heads, norms = case.heads, case.norms()
    queries, keys, values = case.projections()
    rows = len(POSITIONS)
    queries = queries.reshape(rows, heads.num, -1)[..., : heads.dim]
    keys, values = (side.reshape(rows, heads.num_kv, heads.dim) for side in (keys, values))
    if heads.epsilon is not None and norms is not None:
        queries, keys = (
            side / np.sqrt((side**2).mean(axis=-1, keepdims=True) + epsilon) * weight
            for side, weight, epsilon in zip((queries, keys), norms, heads.epsilon, strict=False)
        )
        if heads.norms_values:
            values = values / np.sqrt((values**2).mean(axis=-1, keepdims=True) + heads.epsilon[-1])
    return [turned(queries, case), turned(keys, case), values]


def turned(rows: np.ndarray, case: Rotation) -> np.ndarray:
    turned, pairs = rows.copy(), case.heads.rotated // 2
    for pair in range(pairs):
        first, second = (
            (2 * pair, 2 * pair + 1) if case.heads.is_traditional else (pair, pair + pairs)
        )
        angle = case.angles()[:, pair].astype(float)[:, None]
        x, y = rows[..., first], rows[..., second]
        turned[..., first] = x * np.cos(angle) - y * np.sin(angle)
        turned[..., second] = x * np.sin(angle) + y * np.cos(angle)
    return turned


def run(backend: Backend, case: Rotation) -> tuple[mx.array, list[np.ndarray]]:
    """(the queries, (slots, kv heads, row) of both pools), which held 3 everywhere before."""
    heads = case.heads
    dtype = mx.int8 if case.is_quantised else case.dtype
    shape = NUM_PAGES, heads.num_kv, case.page_size, heads.dim, dtype
    pools = backend.new_pool(*shape), backend.new_pool(*shape)
    every = np.arange(NUM_PAGES * case.page_size, dtype=np.int32)
    row = mx.full((len(every), heads.num_kv, row_width(heads.dim, dtype)), 3, dtype)
    pools = backend.write_kv(row, row, *pools, every)
    projected = [
        mx.array(rows.astype(np.float32)).astype(case.dtype) for rows in case.projections()
    ]
    if case.is_joined:
        projected = [mx.concatenate(projected, axis=-1)]
    weights = case.norms()
    norms = None
    if weights is not None:
        first, second = (mx.array(w.astype(np.float32)).astype(case.dtype) for w in weights)
        norms = first, second
    queries, pools = backend.rotate_and_write(
        projected, turns_of(case), heads, norms, pools, case.slots
    )
    held = backend.read_kv(*pools, every)
    return queries, [read(side if case.is_quantised else side.astype(mx.float32)) for side in held]


def check(backend: Backend, case: Rotation) -> None:
    """Everything that a row becomes is right, and nothing else has changed."""
    queries, held = run(backend, case)
    assert queries.shape == (len(POSITIONS), case.heads.num, 1, case.heads.dim)
    assert queries.dtype == case.dtype
    wanted = expected(case)
    close(read(queries.astype(mx.float32))[:, :, 0], wanted[0], case.dtype)
    for side, rows in zip(held, wanted[1:], strict=True):
        others = np.delete(side, case.slots, axis=0)
        assert (others == 3).all()
        written = side[case.slots]
        if case.is_quantised:
            scales = np.ascontiguousarray(written[..., -4:]).view(np.float32)
            assert np.allclose(scales[..., 0], np.abs(rows).max(axis=-1) / 127, rtol=2e-2)
            apart = np.abs(written[..., :-4] * scales - rows) / scales
            assert apart.max() <= 0.5 + 3 * 127 * UNITS[case.dtype]
        else:
            close(written, rows, case.dtype)


def close(found: np.ndarray, wanted: np.ndarray, dtype: mx.Dtype) -> None:
    apart = np.abs(found - wanted).max(axis=-1) / np.abs(wanted).max(axis=-1)
    assert apart.max() <= 3 * UNITS[dtype]


NORMS = (1e-6, 0.25)
OF_VALUES = (*NORMS, 0.7)
USUAL = Rotation(Heads(4, 2, 128, 128, epsilon=NORMS), mx.float16)
KINDS = [
    USUAL,
    Rotation(Heads(3, 1, 64, 64), mx.bfloat16, page_size=32),
    Rotation(Heads(4, 2, 80, 20, epsilon=NORMS), mx.float16, is_joined=False),
    Rotation(Heads(2, 2, 64, 64, is_traditional=True), mx.float32, is_joined=False),
    Rotation(Heads(4, 2, 96, 32, is_traditional=True, epsilon=NORMS), mx.bfloat16),
    Rotation(Heads(4, 1, 64, 16, step=128, epsilon=NORMS), mx.float16),
    Rotation(Heads(2, 1, 64, 0, step=64), mx.float16),
    replace(USUAL, is_quantised=True),
    Rotation(Heads(4, 2, 80, 40, is_traditional=True), mx.float32, is_quantised=True),
    Rotation(Heads(4, 2, 80, 80, epsilon=OF_VALUES), mx.float16),
    Rotation(Heads(2, 1, 256, 256, epsilon=OF_VALUES), mx.bfloat16, is_joined=False),
]

# Idle lanes, gates beside queries, both kinds of pairs, one projection and three, norms of values.
ROTATIONS = [KINDS[2], KINDS[5], KINDS[4], KINDS[1], KINDS[9]]


@pytest.mark.slow
def test_rows_are_normalised_rotated_and_written(checked_backend: MetalBackend) -> None:
    for case in KINDS:
        check(checked_backend, case)


def test_the_specification_does_the_same() -> None:
    for case in KINDS:
        for backend in [ReferenceBackend(), PlainBackend()]:
            check(backend, case)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "head_dim",
    [pytest.param(d, marks=pytest.mark.slow if d == 80 else pytest.mark.long) for d in HEAD_DIMS],
)
def test_every_head_dimension(
    head_dim: int, dtype: mx.Dtype, checked_backend: MetalBackend
) -> None:
    for rotated in (head_dim, head_dim // 4):
        heads = Heads(2, 1, head_dim, rotated, step=head_dim, epsilon=NORMS)
        for page_size in PAGE_SIZES:
            check(checked_backend, Rotation(heads, dtype, page_size))
        check(checked_backend, Rotation(heads, dtype, is_quantised=True))
        traditional = heads._replace(is_traditional=True, epsilon=None)
        check(checked_backend, Rotation(traditional, dtype, is_joined=False))


def test_values_are_moved_bit_by_bit(checked_backend: MetalBackend) -> None:
    """NaN with a payload, and what no arithmetic would leave alone."""
    patterns = np.random.default_rng(3).integers(0, 1 << 16, (2, 1, 64)).astype(np.uint16)
    values = mx.array(patterns).view(mx.float16)
    heads = Heads(1, 1, 64, 64, step=64)
    pools = [checked_backend.new_pool(2, 1, 16, 64, mx.float16) for _ in range(2)]
    rows, slots = mx.ones((2, 1, 64), mx.float16), np.array([17, 3], np.int32)
    turns = mx.ones((2, 1, 1, 64))
    checked_backend.rotate_and_write(
        (rows, rows, values), turns, heads, None, (pools[0], pools[1]), slots
    )
    _, held = checked_backend.read_kv(pools[0], pools[1], slots)
    assert np.array_equal(read(held.view(mx.uint16))[:, 0], patterns[:, 0])


def check_8_bits(backend: Backend) -> None:
    """Rows of zeros, next to zero, with NaN and infinity become the bytes that `ops.py` states."""
    rows = np.random.default_rng(7).standard_normal((2, 6, 2, 80), np.float32)
    rows[0, 1, 0], rows[0, 2, 1], rows[1, 3, 0, 5], rows[1, 4, 1, 79] = 0, 1e-37, np.nan, np.inf
    heads, slots = Heads(2, 2, 80, 0, step=80), np.array([3, 4, 5, 20, 21, 31], np.int32)
    pools = backend.new_pool(2, 2, 16, 80, mx.int8), backend.new_pool(2, 2, 16, 80, mx.int8)
    keys, values = (mx.array(side.reshape(6, 1, 160)) for side in rows)
    _, pools = backend.rotate_and_write(
        (keys, keys, values), mx.zeros(8), heads, None, pools, slots
    )
    held = backend.read_kv(*pools, np.arange(32, dtype=np.int32))
    for pool, side in zip(held, rows, strict=True):
        written, scales = quantised(side)
        found = read(pool)
        assert np.array_equal(found[slots, :, :-4], written)
        assert np.array_equal(found[slots, :, -4:], scales.view(np.int8))
        assert not np.delete(found, slots, axis=0).any()


def test_rows_in_8_bits_are_bit_by_bit_those_of_the_format(checked_backend: MetalBackend) -> None:
    check_8_bits(checked_backend)
    check_8_bits(ReferenceBackend())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num": 3}, "takes rows of"),
        ({"rotated": 63}, "does not describe heads"),
        ({"rotated": 32}, "takes those of 6 rows"),
        ({"epsilon": NORMS}, "weights and epsilons"),
    ],
)
def test_what_does_not_fit_together_is_refused(
    changes: dict[str, object], message: str, fast_backend: MetalBackend
) -> None:
    case = Rotation()
    pools = [fast_backend.new_pool(NUM_PAGES, 2, 16, 64, mx.float32) for _ in range(2)]
    rows = mx.concatenate(
        [mx.array(each.astype(np.float32)) for each in case.projections()], axis=-1
    )
    heads = case.heads._replace(**changes)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=message):
        fast_backend.rotate_and_write(
            (rows,), turns_of(case), heads, None, (pools[0], pools[1]), case.slots
        )


def test_one_projection_and_three_become_the_same_bits(checked_backend: MetalBackend) -> None:
    joined, pools = run(checked_backend, USUAL)
    three, others = run(checked_backend, replace(USUAL, is_joined=False))
    assert mx.array_equal(joined, three)
    assert all(np.array_equal(one, other) for one, other in zip(pools, others, strict=True))

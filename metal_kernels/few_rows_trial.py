"""Tries on this machine whether `FewRows` computes MLX's bits, and where it is faster.

MLX's order of sums is no part of its interface: it depends on the shape, the chip and the version.
So each kind of product is tried with the model's own weights. Rows are compared in float32 as well,
whose results show every difference of the order; 16 bits would hide all but one in a thousand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TypeAlias

import mlx.core as mx

from metal_kernels.few_rows import PACKS, ROWS, FewRows, Quantised, one_by_one
from metal_kernels.reading import evaluate, read
from metal_kernels.speeds import best_of

# What mlx raises for a text that Apple's compiler refuses, and for too many threads.
REFUSALS = (RuntimeError, ValueError)
_REPEATS = 3
# Bytes of weights that are read for one measurement, and the most matrices: more than caches hold.
_TIMED_BYTES, _MAX_TIMED = 96 << 20, 16

Timer: TypeAlias = Callable[[Callable[[], None]], float]


@dataclass(frozen=True, slots=True)
class FewRowsChoice:
    """The numbers of rows of one kind of product that `FewRows` takes, or why it takes none."""

    rows: frozenset[int] = frozenset()
    packs: int = PACKS[0]
    reason: str = ""


def fastest(run: Callable[[], None]) -> float:
    """Return the best time of a few runs, in nanoseconds, after one that compiles."""
    return best_of(_REPEATS, run)


def try_few_rows(
    kernel: FewRows, weights: Sequence[Quantised], timer: Timer = fastest
) -> FewRowsChoice:
    """Choose where the kernel takes products of one kind.

    weights: matrices of this kind that `refusal` accepts; the first is compared, a few are timed
    """
    try:
        packs = next((each for each in PACKS if _has_equal_bits(kernel, weights[0], each)), None)
        if packs is None:
            return FewRowsChoice(reason="it adds in another order than MLX does for a single row")
        timed = list(islice(weights, _num_timed(weights[0])))
        rows = [each for each in ROWS if _is_faster(kernel, timed, each, packs, timer)]
    except REFUSALS as refused:
        return FewRowsChoice(reason=str(refused))
    return FewRowsChoice(frozenset(rows), packs, "" if rows else "MLX's own products are faster")


def _has_equal_bits(kernel: FewRows, weights: Quantised, packs: int) -> bool:
    """True if a row's results are those of MLX's product of it alone, for every number of rows."""
    exact = weights.astype(mx.float32)
    if not _are_equal(kernel, exact, packs, ROWS[-1:]):
        return False
    return _are_equal(kernel, weights, packs, ROWS)


def _are_equal(kernel: FewRows, weights: Quantised, packs: int, counts: Sequence[int]) -> bool:
    rows = _rows(ROWS[-1], weights)
    alone = one_by_one(rows, weights)
    together = [kernel.product(rows[:count], weights, packs) for count in counts]
    return all(_same_bits(each, alone[: len(each)]) for each in together)


def _same_bits(first: mx.array, second: mx.array) -> bool:
    bits = mx.uint32 if first.dtype == mx.float32 else mx.uint16
    return bool(read(mx.array_equal(first.view(bits), second.view(bits))))


def _is_faster(
    kernel: FewRows, weights: Sequence[Quantised], count: int, packs: int, timer: Timer
) -> bool:
    rows = _rows(count, weights[0])
    evaluate(rows)
    ours = timer(lambda: evaluate(*(kernel.product(rows, each, packs) for each in weights)))
    return ours < timer(partial(_multiply_by_mlx, rows, weights))


def _multiply_by_mlx(rows: mx.array, weights: Sequence[Quantised]) -> None:
    evaluate(*(each.product(rows) for each in weights))


def _rows(count: int, weights: Quantised) -> mx.array:
    shape = count, weights.width
    return mx.random.normal(shape, key=mx.random.key(0)).astype(weights.scales.dtype)


def _num_timed(weights: Quantised) -> int:
    return min(_MAX_TIMED, 1 + _TIMED_BYTES // weights.weights.nbytes)

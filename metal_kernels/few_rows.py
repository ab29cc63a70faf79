"""Products of two to five rows with quantised weights, by one pass of the weights.

MLX reads the weights once for each row on M1 and M2, and once for five rows from M3 on, where few
rows are added in another order than one. `FewRows` reads them once on every chip, and each row's
results equal MLX's of that row alone, bit by bit: a token is computed the same with a draft, beside
other answers and alone. Whether that holds on this machine, and is faster, is tried at load
(`few_rows_trial.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import mlx.core as mx

from metal_kernels.kernels import QMV_ROWS, Dispatch, Kernels, Template
from metal_kernels.ops import FLOATS

ROWS = (2, 3, 4, 5)  # rows of a product; one alone is MLX's
# 32-bit words of a lane in a block: of MLX's qmv_fast, and of its qmv, which it takes for other shapes.
PACKS = (2, 1)
_RESULTS = 4  # of a simdgroup and row
_SIMDGROUPS = 2  # of a threadgroup
BITS, GROUP_SIZES = (4, 8), (32, 64, 128)
# MLX has a kernel of its own for inputs of this width and less, with another order of sums.
_NARROW = 128


@dataclass(frozen=True, eq=False)
class Quantised:
    """Weights (N, K) as MLX's affine quantisation keeps them.

    weights          (N, K * bits / 32) uint32
    scales, biases   (N, K / group_size), of the rows' dtype
    """

    weights: mx.array
    scales: mx.array
    biases: mx.array
    group_size: int
    bits: int

    @cached_property
    def width(self) -> int:
        """Numbers of a row: K."""
        return self.weights.shape[-1] * 32 // self.bits

    @cached_property
    def kind(self) -> tuple[object, ...]:
        """Return what a product's kernel depends on."""
        return (self.weights.shape, self.scales.dtype, self.group_size, self.bits)

    def astype(self, dtype: mx.Dtype) -> Quantised:
        """Return the same weights for rows of another dtype."""
        scales, biases = (each.astype(dtype) for each in (self.scales, self.biases))
        return replace(self, scales=scales, biases=biases)

    def product(self, rows: mx.array) -> mx.array:
        """Multiply (..., K) by MLX: (..., N)."""
        product: mx.array = mx.quantized_matmul(
            rows, self.weights, self.scales, self.biases, True, self.group_size, self.bits
        )
        return product


def as_quantised(
    weights: mx.array,
    scales: mx.array,
    biases: mx.array | None,
    group_size: int,
    bits: int,
    mode: str,
) -> Quantised | None:
    """Return the weights of a layer of mlx's nn; None if their mode is another than "affine"."""
    if mode != "affine" or biases is None:
        return None
    return Quantised(weights, scales, biases, group_size, bits)


def refusal(weights: Quantised) -> str | None:
    """Return why `FewRows` does not take these weights; None if it does."""
    if weights.bits not in BITS or weights.group_size not in GROUP_SIZES:
        return f"{weights.bits} bits with a scale for {weights.group_size} weights"
    if weights.weights.ndim != 2 or weights.width <= _NARROW:
        return f"weights of shape {weights.weights.shape}"
    if len(weights.weights) % (_RESULTS * _SIMDGROUPS):
        return f"{len(weights.weights)} results"
    if weights.scales.dtype not in FLOATS or weights.biases.dtype != weights.scales.dtype:
        return f"scales in {weights.scales.dtype} and biases in {weights.biases.dtype}"
    return None


def one_by_one(rows: mx.array, weights: Quantised) -> mx.array:
    """Multiply each row alone by MLX, which is the specification: (rows, K) -> (rows, N)."""
    return mx.concatenate([weights.product(rows[at : at + 1]) for at in range(len(rows))])


class FewRows:
    """The kernel of these products, with its dispatches by shape."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self._dispatches: dict[object, Dispatch] = {}

    def product(self, rows: mx.array, weights: Quantised, packs: int) -> mx.array:
        """Multiply (..., K), two to five rows in all, by weights that `refusal` accepts: (..., N).

        packs: of `PACKS`, those of MLX's own product of one row
        """
        key = (rows.shape, packs, weights.kind)
        dispatch = self._dispatches.get(key)
        if dispatch is None:
            dispatch = self._dispatches[key] = self._dispatch(rows, weights, packs)
        (out,) = dispatch(
            rows=rows, weights=weights.weights, scales=weights.scales, biases=weights.biases
        )
        return out

    def _dispatch(self, rows: mx.array, weights: Quantised, packs: int) -> Dispatch:
        assert (reason := refusal(weights)) is None, reason
        *others, width = rows.shape
        num_rows, columns = rows.size // width, len(weights.weights)
        if num_rows not in ROWS or width != weights.width or rows.dtype != weights.scales.dtype:
            raise ValueError(
                f"rows of shape {rows.shape} in {rows.dtype} do not belong to weights of width "
                f"{weights.width} with scales in {weights.scales.dtype}, or are not 2 to 5"
            )
        template: Template = [
            ("T", rows.dtype),
            ("BITS", weights.bits),
            ("GROUP", weights.group_size),
            ("ROWS", num_rows),
            ("PACKS", packs),
        ]
        return self._kernels.dispatch(
            QMV_ROWS,
            {},
            {"out": ((*others, columns), rows.dtype)},
            template,
            (32, columns // _RESULTS, 1),
            (32, _SIMDGROUPS, 1),
        )

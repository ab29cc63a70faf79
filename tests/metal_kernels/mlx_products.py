"""MLX's own quantised products of single rows, from its wheel's headers, as a Mac computes them."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from metal_kernels.few_rows import Quantised
from tests.emulator import OutputBuffer
from tests.emulator.tests.mlx_headers import DTYPES, load, scalar

_HEADERS = "steel/gemm/gemm.h quantized_utils.h quantized.h"
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def quantised(
    columns: int, width: int, bits: int, group_size: int, dtype: mx.Dtype, seed: int = 1
) -> Quantised:
    """Random weights (columns, width)."""
    weights = mx.random.normal((columns, width), key=mx.random.key(seed))
    packed, scales, biases = mx.quantize(weights, group_size, bits)
    return Quantised(packed, scales.astype(dtype), biases.astype(dtype), group_size, bits)


def random_rows(count: int, weights: Quantised, seed: int = 2) -> mx.array:
    rows = mx.random.normal((count, weights.width), key=mx.random.key(seed))
    return rows.astype(weights.scales.dtype)


def is_fast(weights: Quantised) -> bool:
    """Whether MLX takes its kernel `qmv_fast`, which wants whole blocks of two words a lane, and not `qmv`."""
    return weights.width % (64 * 32 // weights.bits) == 0 and len(weights.weights) % 8 == 0


def packs_of(weights: Quantised) -> int:
    """Words of a lane in a block of the kernel that MLX takes."""
    return 2 if is_fast(weights) else 1


def rows_alone(rows: mx.array, weights: Quantised) -> mx.array:
    """(rows, N): MLX's kernel for a single row, a row at a time."""
    kernel = "affine_qmv_fast" if is_fast(weights) else "affine_qmv"
    arguments = f"{_NAMES[rows.dtype]}, {weights.group_size}, {weights.bits}, false"
    run = load(_HEADERS, f"{kernel}<{arguments}>", check=False, strict=False)
    columns = len(weights.weights)
    kinds = (np.int32, np.int32, np.int64) * 2 + (np.int64, np.int64)
    inputs = {
        **dict(enumerate((weights.weights, weights.scales, weights.biases, rows))),
        5: scalar(weights.width, np.int32),
        6: scalar(columns, np.int32),
        # Of batches, which are not read.
        **{7 + at: np.zeros(1, kind) for at, kind in enumerate(kinds)},
    }
    return run(
        inputs,
        {4: OutputBuffer((len(rows), columns), rows.dtype)},
        grid=(len(rows) * 32, -(-columns // 8) * 2, 1),
        threadgroup=(32, 2, 1),
    )[4]

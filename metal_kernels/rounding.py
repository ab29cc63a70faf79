"""Rounding: the error that an answer of attention may have in a dtype.

Each head of each row is compared with its own largest number. A row that sees one position has
numbers 25 times those of a row that sees 2,000, so that beside the largest of all rows half of a
long one may be wrong unnoticed.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

# Four units of half precision, of which the emulated kernels need at most 1.6 and rounding alone takes a half.
# In float32 a row of 2,000 positions needs 41 units of 2^-24 there, and a GPU's exp2 adds some.
TOLERANCES = {mx.float32: 1e-4, mx.float16: 4 * 2.0**-11, mx.bfloat16: 4 * 2.0**-8}


def row_error(ours: npt.NDArray[Any], right: npt.NDArray[Any]) -> float:
    """Largest error of a head's row, relative to the row's largest number; NaN if there is one.

    Both (rows, heads, head_dim).
    """
    assert ours.shape == right.shape
    errors = np.abs(ours - right).max(axis=-1) / np.abs(right).max(axis=-1)
    return float(errors.max())

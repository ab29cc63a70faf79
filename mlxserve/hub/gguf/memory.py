"""Allocates mlx arrays without writing them, for numpy to fill.

`mx.empty` is `mx.zeros`, which writes an array once on one thread before numpy can: a third of the
time of a load of Q8_0 or F16. `mx.load` hands the memory of an array to the file that fills it, and
this file leaves it as it is. Two other ways were no faster in whole loads: pages of 2 MB
(MADV_HUGEPAGE; in a virtual machine that gives free memory back, three times as slow) and pages
mapped before they are written (MADV_POPULATE_WRITE, of a tensor or of each piece).
"""

from __future__ import annotations

from io import BytesIO
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.lib import format as npy


def unwritten(shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    """Return an array whose values are whatever its memory held before. Not for bfloat16."""
    file = _OnlyHeader()
    name = str(dtype).removeprefix("mlx.core.")
    described = {"descr": np.dtype(name).str, "fortran_order": False, "shape": shape}
    npy.write_array_header_1_0(file, described)
    file.seek(0)
    array = mx.load(file, format="npy")
    assert isinstance(array, mx.array)
    return array


class _OnlyHeader(BytesIO):
    """An npy file with a header only: reading its data leaves the memory as it is."""

    def readinto(self, buffer: Any, /) -> int:
        return super().readinto(buffer) or len(buffer)  # number of bytes

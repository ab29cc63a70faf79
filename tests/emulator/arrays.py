"""mx.array and numpy views of it, bit for bit. bfloat16, which numpy lacks, travels as uint16."""

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

AnyArray = NDArray[np.generic]


def dtype_name(dtype: mx.Dtype) -> str:
    """`float16` for mx.float16, and so on."""
    return str(dtype).rsplit(".", 1)[-1]


def as_numpy(array: mx.array) -> AnyArray:
    """The array's own memory, evaluated; writing to it changes the array."""
    if array.dtype == mx.bfloat16:
        array = array.view(mx.uint16)
    mx.eval(array)
    return np.array(array, copy=False)


def as_mlx(array: AnyArray, dtype: mx.Dtype) -> mx.array:
    """A copy."""
    out = mx.array(array)
    return out.view(mx.bfloat16) if dtype == mx.bfloat16 else out


def new_output(shape: Sequence[int], dtype: mx.Dtype, init_value: float | None) -> AnyArray:
    """Memory for an output: filled, or with every bit set, so that what stays unwritten is NaN."""
    if init_value is not None:
        return as_numpy(mx.full(tuple(shape), init_value, dtype=dtype)).copy()
    name = "uint16" if dtype == mx.bfloat16 else dtype_name(dtype)
    out = np.empty(tuple(shape), np.dtype(name))
    out.reshape(-1).view(np.uint8)[:] = 0xFF
    return out

"""Reading: the only way from a device array to numpy.

`np.array` of an array that mlx has not computed yet swallows the error of its computation and returns
whatever the memory holds: the inverse of a singular matrix is read as ones. So it is computed first,
where mlx raises. `tests/test_device_reads.py` forbids every other way.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt


class DeviceError(RuntimeError):
    """The device failed to compute an array. `__cause__` is mlx's error."""


def evaluate(*arrays: mx.array) -> None:
    """Wait until the device has computed the arrays. Raises DeviceError."""
    try:
        mx.eval(*arrays)
    except RuntimeError as error:
        raise DeviceError(f"the device failed to compute an array: {error}") from error


def read(array: mx.array) -> npt.NDArray[Any]:
    """A copy of the array; not of bfloat16, which numpy does not know. Raises DeviceError."""
    evaluate(array)
    return np.array(array)


def view(array: mx.array) -> npt.NDArray[Any]:
    """Return the array's own memory, which must be contiguous. Raises DeviceError."""
    evaluate(array)
    return np.array(array, copy=False)

"""Writes the scales and biases of groups as float32 or float16.

On x86 numpy takes 5 ns to make a float32 a float16 and 2.5 ns for the other way, mlx 3 and 2: half
of the time of repacking Q4_0. Scales that are float16 in the file are copied, and others rounded by
passes over integers.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from mlxserve.hub.gguf.lanes import Bytes, Floats, Halves

Scale = Floats | Halves | Bytes
_SMALLER = np.float32(2.0**-112)  # a float32 has the exponent of a float16 then
_SIGN, _INFINITE = np.uint32(1 << 31), np.uint32(0x7BFF << 13)


def write_scales(
    repacked: Scale,
    zero: int,
    scales: npt.NDArray[Any],
    biases: npt.NDArray[Any] | None = None,
) -> None:
    """Write the scales and biases that a repacking returned."""
    kept = _in_dtype(repacked, scales.dtype)
    if biases is None:
        scales[...] = kept
    elif zero:
        scales[...] = kept
        biases[...] = _times(kept, -zero)
    else:
        scales[...], biases[...] = kept


def _in_dtype(values: Scale, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    if dtype == np.float16 and values.dtype == np.float32:
        return in_float16(values)
    return values.astype(dtype, copy=False)


def in_float16(values: npt.NDArray[Any]) -> Halves:
    """Round float32 to float16; ties round away from zero."""
    bits = (values * _SMALLER).view(np.uint32)
    signs = bits & _SIGN
    bits ^= signs
    if bits.max() >= _INFINITE:
        return values.astype(np.float16)
    bits += np.uint32(0x1000)
    bits >>= np.uint32(13)
    signs >>= np.uint32(16)
    bits |= signs
    return bits.astype(np.uint16).view(np.float16)


def _times(values: npt.NDArray[Any], factor: int) -> npt.NDArray[Any]:
    if values.dtype == np.float32:
        return values * np.float32(factor)
    return _products(factor).take(values.view(np.uint16))


@cache
def _products(factor: int) -> Halves:
    """Table of all float16 numbers times `factor`, a power of 2."""
    with np.errstate(all="ignore"):
        every = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)
        return (every * factor).astype(np.float16)

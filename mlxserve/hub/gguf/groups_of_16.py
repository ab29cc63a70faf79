"""Repacks Q2_K, Q3_K and Q6_K, whose groups have 16 values, as 8 bits in mlx's groups of 32.

Two groups with different scales share one of mlx's. Their scales are whole multiples of one of the block: in
Q3_K of at most 32, with which all values are one of 253 steps of the block's scale. In Q2_K each group has an
offset as well: the step is the block's scale, divided by the largest whole number with which 253 steps reach all
values of both, and the offset of one is rounded to it. In Q6_K the larger scale decides: its codes are multiplied
by 4, and its values stay as they are; those of the other group are rounded to a step as fine.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from mlxserve.hub.gguf.lanes import ONES, Bytes, Floats, Lanes, columns, fields, halves, lanes

Numbers = npt.NDArray[np.uint16]
_FIELDS = np.uint64(0x0001000100010001)  # four of 16 bits
_HALF = 128  # rounds to the nearest, in 1/256
_STEPS = np.float32(253)  # two more may come from rounding
# Added to a number, this leaves its nearest integer in the lower bits.
_WHOLE = np.float32(3 << 22)


def q2_k(raw: Bytes, codes: Bytes) -> Floats:
    two = fields(lanes(raw, 16, 80).reshape(2, 4, -1), 2)
    small = columns(raw, 0, 16).reshape(8, 2, -1)
    half, offset = halves(raw, 80), halves(raw, 82)
    factors = (small & 15) * (half != 0)
    # In units of `half`, a value is factor * code - ratio * below.
    unit = np.where(half == 0, np.float32(1), half)
    ratio = offset / unit
    below = small >> 4
    # 15 - below is what is above the least value then.
    flipped = (ratio < 0) * np.uint8(15)
    below ^= flipped
    lowest = np.maximum(below[:, 0], below[:, 1])
    starts = (lowest[:, np.newaxis] - below) * np.abs(ratio)
    ends = starts + (3 * factors + 1)  # never 0
    steps = _STEPS / np.maximum(ends[:, 0], ends[:, 1])
    whole = np.floor(steps)
    steps = whole if whole.all() else np.where(whole == 0, steps, whole)
    starts *= steps[:, np.newaxis]
    slopes = factors * steps[:, np.newaxis]
    _multiply_bytes(two.reshape(16, 2, -1), _rounded(slopes), _rounded(starts), codes)
    return np.stack((unit / steps, (lowest ^ flipped) * -offset)).swapaxes(1, 2)


def q3_k(raw: Bytes, codes: Bytes) -> Floats:
    three = fields(lanes(raw, 32, 96).reshape(2, 4, -1), 2).reshape(8, 4, -1)
    three |= fields(lanes(raw, 0, 32), 1, 2)
    factors = fields(columns(raw, 96, 104), 4).reshape(16, -1)  # offset by 32
    factors |= fields(columns(raw, 104, 108), 2, 4).reshape(16, -1)
    # 128 - factor * (code - 4), because a factor of -32 is common and one of 32 does not exist
    slopes = np.uint16(32) - factors
    _multiply_bytes(three.reshape(16, 2, -1), slopes, factors << 2, codes)
    return -halves(raw, 108)[:, np.newaxis]


def q6_k(raw: Bytes, codes: Bytes) -> Floats:
    six = fields(lanes(raw, 0, 128).reshape(2, 8, -1), 4).reshape(2, 4, 4, -1)
    six |= fields(lanes(raw, 128, 192).reshape(2, 4, -1), 2, 4)
    scales = columns(raw, 192, 208).view(np.int8).reshape(8, 2, -1)
    (first, second), sizes = scales.swapaxes(0, 1), np.abs(scales).view(np.uint8)
    # One of both, modulo 256: np.where takes five times as long.
    larger = first + (second - first) * (sizes[:, 0] < sizes[:, 1])
    # Where both are 0, any step but infinity does.
    steps = np.float32(1024) / (larger | (larger == 0)).astype(np.float32)
    slopes = scales * steps[:, np.newaxis]
    # Of a scale of the other sign, code 0 must not become 256.
    np.maximum(slopes, -((32767 - _HALF) // 32), out=slopes)
    _multiply(six.reshape(16, 2, -1), _rounded(slopes), codes)
    return (halves(raw, 208) * np.float32(0.25) * larger).T


def _multiply_bytes(
    operands: Lanes, slopes: Numbers, starts: npt.NDArray[Any], codes: Bytes
) -> None:
    """Write slope * code + start for (16, 2, n) lanes, which are overwritten.

    All results are bytes, so two of them are one number of 16 bits: what a product takes from the
    upper one, its start gives back. Starts have 16 bits or 8.
    """
    pairs = operands.view(np.uint16)
    pairs *= _in_each_field(slopes)
    pairs += (starts.reshape(16, 1, -1) * ONES).view(np.uint16)
    codes.view(np.uint64)[...] = operands.reshape(32, -1).T


def _multiply(operands: Lanes, slopes: Numbers, codes: Bytes) -> None:
    """Write slope * (code - 32) / 256 + 128 for (16, 2, n) lanes, which are overwritten.

    Two codes share a number of 16 bits: what a product overflows by, its sum gets back.
    """
    by_four = _in_each_field(slopes)
    starts = np.uint16(32768 + _HALF) - by_four * np.uint16(32)
    upper = operands.view(np.uint16)
    lower = upper & np.uint16(0xFF)
    upper >>= np.uint16(8)
    for part in (lower, upper):
        part *= by_four
        part += starts
    lower >>= np.uint16(8)
    upper &= np.uint16(0xFF00)
    upper |= lower
    codes.view(np.uint64)[...] = operands.reshape(32, -1).T


def _rounded(numbers: Floats) -> Numbers:
    """Round to whole steps, modulo 65536."""
    return (numbers + _WHOLE).view(np.uint32).astype(np.uint16)


def _in_each_field(numbers: Numbers) -> Numbers:
    """Repeat each of (16, n) or (8, 2, n) numbers four times: (16, 1, 4 * n)."""
    return (numbers.reshape(16, 1, -1) * _FIELDS).view(np.uint16)

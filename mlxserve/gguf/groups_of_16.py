"""Repacks Q2_K, Q3_K and Q6_K, whose groups have 16 values, as 8 bits in mlx's groups of 32.

Two groups with different scales share one of mlx's. In Q3_K and Q6_K the larger scale decides: its codes are
multiplied by 32 or 4, and its values stay as they are; those of the other group are rounded to a step as
fine. In Q2_K each group has an offset as well, and what both can reach is divided by 255.

    code of 8 bits = (slope * code of the file + start) / 256      in 16 bits
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from mlxserve.gguf.lanes import NIBBLES, Bytes, Floats, Lanes, columns, halves, lanes, shifted

_FIELDS = np.uint64(0x0001000100010001)  # four of 16 bits
_HALF = 128  # what rounds to the nearest, in 1/256


def q6_k(raw: Bytes, codes: Bytes) -> tuple[Floats, Floats]:
    pairs = lanes(raw, 0, 128).reshape(2, 2, 4, -1)
    top = lanes(raw, 128, 192).reshape(2, 4, -1)
    six = np.empty((2, 4, 4, len(raw)), np.uint64)
    np.bitwise_and(pairs, NIBBLES, out=six[:, :2])
    pairs >>= np.uint64(4)
    np.bitwise_and(pairs, NIBBLES, out=six[:, 2:])
    for place in range(4):
        six[:, place] |= shifted(top, 4 - 2 * place, 0x30)
    factors = halves(raw, 208) * columns(raw, 192, 208).view(np.int8)
    return _around_the_middle(six.reshape(16, 2, -1), 32, factors, codes)


def q3_k(raw: Bytes, codes: Bytes) -> tuple[Floats, Floats]:
    third, pairs = lanes(raw, 0, 32), lanes(raw, 32, 96).reshape(2, 4, -1)
    three = np.empty((2, 4, 4, len(raw)), np.uint64)
    for place in range(4):
        three[:, place] = shifted(pairs, -2 * place, 3)
        for half in (0, 1):
            three[half, place] |= shifted(third, 2 - 4 * half - place, 4)
    low, top = columns(raw, 96, 104), columns(raw, 104, 108)
    scales = np.concatenate((low & 15, low >> 4))
    for place in range(4):
        scales[4 * place :][:4] |= ((top >> 2 * place) & 3) << 4
    factors = halves(raw, 108) * (scales.view(np.int8) - np.int8(32))
    return _around_the_middle(three.reshape(16, 2, -1), 4, factors, codes)


def q2_k(raw: Bytes, codes: Bytes) -> tuple[Floats, Floats]:
    pairs = lanes(raw, 16, 80).reshape(2, 4, -1)
    two = np.empty((2, 4, 4, len(raw)), np.uint64)
    for place in range(4):
        two[:, place] = shifted(pairs, -2 * place, 3)
    small = columns(raw, 0, 16)
    factors, offsets = halves(raw, 80) * (small & 15), -halves(raw, 82) * (small >> 4)
    ends = np.stack((offsets, offsets + 3 * factors)).reshape(2, 8, 2, -1)
    # In bfloat16's 8 bits, so that both are the same in every dtype that they are kept in.
    bias = _in_bfloat16(ends.min(axis=(0, 2)), up=False)
    scale = _in_bfloat16((ends.max(axis=(0, 2)) - bias) / 255, up=True)
    steps = np.divide(256, scale, out=np.zeros_like(scale), where=scale > 0).repeat(2, axis=0)
    starts = np.rint((offsets - bias.repeat(2, axis=0)) * steps)
    slopes = _in_each_field(np.rint(factors * steps))
    _multiply(two.reshape(16, 2, -1), slopes, _in_each_field(starts + _HALF), codes)
    return scale.T, bias.T


def _around_the_middle(
    found: Lanes, middle: int, factors: Floats, codes: Bytes
) -> tuple[Floats, Floats]:
    """Quantise factor * (code - middle), of (16, 2, n) lanes of codes and (16, n) factors.

    The bias is -128 scales in every dtype, so rounding the scale moves no value against another.
    """
    pairs = factors.reshape(8, 2, -1)
    first, second = pairs[:, 0], pairs[:, 1]
    larger = np.where(np.abs(first) >= np.abs(second), first, second)
    unit = 32768 // middle
    steps = np.divide(unit, larger, out=np.zeros_like(larger), where=larger != 0)
    slopes = np.rint(pairs * steps[:, np.newaxis]).reshape(16, -1)
    # Of a factor of the other sign, code 0 must not become 256.
    np.maximum(slopes, -((32767 - _HALF) // middle), out=slopes)
    fields = _in_each_field(slopes)
    _multiply(found, fields, np.uint16(32768 + _HALF) - fields * np.uint16(middle), codes)
    scale = larger * np.float32(middle / 128)
    return scale.T, -128 * scale.T


def _multiply(
    found: Lanes, slopes: npt.NDArray[np.uint16], starts: npt.NDArray[np.uint16], codes: Bytes
) -> None:
    """Write (slope * code + start) / 256 of (16, 2, n) lanes, which are overwritten.

    By numbers of 16 bits, two codes in each: what a product overflows by, its sum gets back.
    """
    upper = found.view(np.uint16)
    lower = upper & np.uint16(0xFF)
    upper >>= np.uint16(8)
    for fields in (lower, upper):
        fields *= slopes
        fields += starts
    lower >>= np.uint16(8)
    upper &= np.uint16(0xFF00)
    upper |= lower
    codes.view(np.uint64)[...] = found.reshape(32, -1).T


def _in_each_field(numbers: Floats) -> npt.NDArray[np.uint16]:
    """(16, n) numbers, modulo 65536, as (16, 1, 4 * n): four times each."""
    return (numbers.astype(np.int32).astype(np.uint16) * _FIELDS).view(np.uint16)[:, np.newaxis]


def _in_bfloat16(values: Floats, *, up: bool) -> Floats:
    """The next number above or below that bfloat16 has."""
    cut = (values.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    away = (cut.view(np.uint32) + np.uint32(0x10000)).view(np.float32)
    return np.where(cut >= values if up else cut <= values, cut, away)

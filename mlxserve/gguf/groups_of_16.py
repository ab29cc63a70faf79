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

Signed = npt.NDArray[np.int8]
_FIELDS = np.uint64(0x0001000100010001)  # four of 16 bits
_HALF = 128  # what rounds to the nearest, in 1/256
_TINY = np.float32(1e-30)  # below every scale but 0
_WHOLE = np.float32(3 << 22)  # added to a number, this leaves its nearest integer in the lower bits


def q6_k(raw: Bytes, codes: Bytes) -> tuple[Floats, Floats]:
    pairs = lanes(raw, 0, 128).reshape(2, 2, 4, -1)
    top = lanes(raw, 128, 192).reshape(2, 4, -1)
    six = np.empty((2, 4, 4, len(raw)), np.uint64)
    np.bitwise_and(pairs, NIBBLES, out=six[:, :2])
    pairs >>= np.uint64(4)
    np.bitwise_and(pairs, NIBBLES, out=six[:, 2:])
    for place in range(4):
        six[:, place] |= shifted(top, 4 - 2 * place, 0x30)
    scales = columns(raw, 192, 208).view(np.int8)
    return _around_the_middle(six.reshape(16, 2, -1), 32, halves(raw, 208), scales, codes)


def q3_k(raw: Bytes, codes: Bytes) -> tuple[Floats, Floats]:
    third, pairs = lanes(raw, 0, 32), lanes(raw, 32, 96).reshape(2, 4, -1)
    thirds = np.stack((third, third >> np.uint64(4)))
    three = np.empty((2, 4, 4, len(raw)), np.uint64)
    for place in range(4):
        shifted(pairs, -2 * place, 3, three[:, place])
        three[:, place] |= shifted(thirds, 2 - place, 4)
    low, top = columns(raw, 96, 104), columns(raw, 104, 108)
    scales = np.concatenate((low & 15, low >> 4))
    for place in range(4):
        scales[4 * place :][:4] |= ((top >> 2 * place) & 3) << 4
    signed = scales.view(np.int8) - np.int8(32)
    return _around_the_middle(three.reshape(16, 2, -1), 4, halves(raw, 108), signed, codes)


def q2_k(raw: Bytes, codes: Bytes) -> tuple[Floats, Floats]:
    pairs = lanes(raw, 16, 80).reshape(2, 4, -1)
    two = np.empty((2, 4, 4, len(raw)), np.uint64)
    for place in range(4):
        shifted(pairs, -2 * place, 3, two[:, place])
    small = columns(raw, 0, 16).reshape(8, 2, -1)
    factors, offsets = (small & 15).astype(np.float32), (small >> 4).astype(np.float32)
    factors *= halves(raw, 80)
    offsets *= -halves(raw, 82)
    ends = offsets + 3 * factors
    lower, upper = np.minimum(offsets, ends), np.maximum(offsets, ends)
    # In bfloat16's 8 bits, so that both are the same in every dtype that they are kept in.
    bias = _below_in_bfloat16(np.minimum(lower[:, 0], lower[:, 1]))
    scale = -_below_in_bfloat16((bias - np.maximum(upper[:, 0], upper[:, 1])) / 255)
    steps = (256 / np.maximum(scale, _TINY))[:, np.newaxis]
    factors *= steps
    offsets -= bias[:, np.newaxis]
    offsets *= steps
    starts = _in_each_field(offsets) + np.uint16(_HALF)
    _multiply(two.reshape(16, 2, -1), _in_each_field(factors), starts, codes)
    return scale.T, bias.T


def _around_the_middle(
    found: Lanes, middle: int, half: Floats, scales: Signed, codes: Bytes
) -> tuple[Floats, Floats]:
    """Quantise half * scale * (code - middle), of (16, 2, n) lanes of codes and (16, n) scales.

    The bias is -128 scales in every dtype, so rounding the scale moves no value against another.
    """
    pairs = scales.reshape(8, 2, -1)
    (first, second), sizes = pairs.swapaxes(0, 1), np.abs(pairs).view(np.uint8)
    # One of both, modulo 256: np.where takes five times as long.
    larger = first + (second - first) * (sizes[:, 0] < sizes[:, 1])
    # Where both are 0, any step but infinity does.
    steps = np.float32(32768 // middle) / (larger | (larger == 0)).astype(np.float32)
    slopes = pairs * steps[:, np.newaxis]
    # Of a scale of the other sign, code 0 must not become 256.
    np.maximum(slopes, -((32767 - _HALF) // middle), out=slopes)
    fields = _in_each_field(slopes)
    _multiply(found, fields, np.uint16(32768 + _HALF) - fields * np.uint16(middle), codes)
    scale = half * np.float32(middle / 128) * larger
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
    """(8, 2, n) numbers, rounded and modulo 65536, as (16, 1, 4 * n): four times each."""
    rounded = (numbers + _WHOLE).view(np.uint32).astype(np.uint16)
    return (rounded * _FIELDS).view(np.uint16).reshape(16, 1, -1)


def _below_in_bfloat16(values: Floats) -> Floats:
    """The next number down that bfloat16 has."""
    bits = values.view(np.int32)
    # Cut off, negative numbers become larger: they are moved down by almost a step before.
    return ((bits + ((bits >> 31) & 0xFFFF)) & ~0xFFFF).view(np.float32)

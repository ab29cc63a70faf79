"""Repacks GGUF's blocks as mlx's quantised weights, without dequantising what need not be.

A block of 32 values with one scale and one offset is mlx's affine quantisation in groups of 32:
w = scale * code + bias. Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K and Q5_K are such blocks, so their codes are
only put into another order: exact with float32 scales. In float16, scales of Q4_K and Q5_K (products of
two numbers) are rounded by at most 2^-11; those of the others are float16 in the file and stay exact.
MXFP4 is mlx's mxfp4. Q2_K, Q3_K and Q6_K have groups of 16, which mlx has not: they become 8 bits in
groups of 32, with an error of 0.5 % (rms).

Codes are packed little-endian, first value lowest, as `mx.quantize` does. Layouts: ggml-common.h and
ggml-quants.c of llama.cpp.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import gguf
import numpy as np
import numpy.typing as npt

GROUP_SIZE = 32
Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Lanes = npt.NDArray[np.uint64]  # of eight bytes
_NIBBLES, _ONES = np.uint64(0x0F0F0F0F0F0F0F0F), np.uint64(0x0101010101010101)
_EVEN = np.uint64(0x00FF00FF00FF00FF)
_SHIFTS = np.array([0, 2, 4, 6], np.uint64)[:, np.newaxis, np.newaxis]
# The bits of a byte, each as the fifth bit of a code of eight.
_FIFTH_BITS: Lanes = (
    (np.unpackbits(np.arange(256, dtype=np.uint8)[:, np.newaxis], axis=1, bitorder="little") << 4)
    .view(np.uint64)
    .reshape(-1)
)
# The scale of each group, and its bias, which mxfp4 has not; a block is a row of each
Scales = tuple[Floats | Bytes, Floats | None]


@dataclass(frozen=True, slots=True)
class Repacking:
    """repack  (blocks, codes) -> scales; takes (num_blocks, bytes of a block) and writes the codes"""

    bits: int
    repack: Callable[[Bytes, Bytes], Scales]
    mode: str = "affine"


def _half(raw: Bytes) -> Floats:
    """Two bytes of each block as a float, in a column."""
    return np.ascontiguousarray(raw).view(np.float16).astype(np.float32)


def _lanes(raw: Bytes, start: int, end: int) -> Lanes:
    """(count, n): bytes of each block, eight to a lane. Long rows are several times faster than short ones."""
    return np.ascontiguousarray(raw[:, start:end].view(np.uint64).T)


def _split(nibbles: Bytes, codes: Bytes) -> None:
    """Write the low halves of each 16 or 32 bytes as packed 4-bit codes, and after them the high ones."""
    pairs = np.array(nibbles).view(np.uint16)
    # What is stored of a block at once is one number of 8 or 16 bytes: single bytes take several times as long.
    half = np.uint64 if nibbles.shape[-1] == 16 else np.complex128
    halves = codes.view(half).reshape(-1, 2)
    for place in (0, 1):
        found = pairs & 0x0F0F
        found |= found >> 4
        halves[:, place] = found.astype(np.uint8).view(half).reshape(-1)
        pairs >>= 4


def _pack_5_bits(lanes: Lanes, codes: Bytes) -> None:
    """(groups, 4, n) lanes of eight codes -> (n, groups * 20) bytes. Overwrites the lanes.

    Eight codes of 5 bits in 64 are joined in three steps to 40, and the 160 bits of four lanes stored as
    three numbers.
    """
    for low, shift, high in (
        (0x001F001F001F001F, 3, 0x03E003E003E003E0),
        (0x000003FF000003FF, 6, 0x000FFC00000FFC00),
        (0x00000000000FFFFF, 12, 0x000000FFFFF00000),
    ):
        upper = lanes >> np.uint64(shift)
        upper &= np.uint64(high)
        lanes &= np.uint64(low)
        lanes |= upper
    first, second, third, fourth = (lanes[:, place].T for place in range(4))
    rows = codes.reshape(len(codes), -1, 20)
    rows[:, :, :8].view(np.uint64)[..., 0] = first | second << np.uint64(40)
    rows[:, :, 8:16].view(np.uint64)[..., 0] = (
        second >> np.uint64(24) | third << np.uint64(16) | fourth << np.uint64(56)
    )
    rows[:, :, 16:].view(np.uint32)[..., 0] = fourth >> np.uint64(8)


def _q4_0(raw: Bytes, codes: Bytes) -> Scales:
    scale = _half(raw[:, :2])
    _split(raw[:, 2:], codes)
    return scale, -8 * scale


def _q4_1(raw: Bytes, codes: Bytes) -> Scales:
    _split(raw[:, 4:], codes)
    return _half(raw[:, :2]), _half(raw[:, 2:4])


def _five(raw: Bytes, fifth: int, nibbles: int, codes: Bytes) -> None:
    """Pack 32 values: four bytes of fifth bits and 16 of low bits, which begin at these bytes."""
    pairs = _lanes(raw, nibbles, nibbles + 16)
    lanes = np.concatenate((pairs, pairs >> np.uint64(4)))
    lanes &= _NIBBLES
    lanes |= _FIFTH_BITS[raw[:, fifth : fifth + 4].T]
    _pack_5_bits(lanes[np.newaxis], codes)


def _q5_0(raw: Bytes, codes: Bytes) -> Scales:
    scale = _half(raw[:, :2])
    _five(raw, 2, 6, codes)
    return scale, -16 * scale


def _q5_1(raw: Bytes, codes: Bytes) -> Scales:
    _five(raw, 4, 8, codes)
    return _half(raw[:, :2]), _half(raw[:, 2:4])


def _q8_0(raw: Bytes, codes: Bytes) -> Scales:
    scale = _half(raw[:, :2])
    np.bitwise_xor(raw[:, 2:], np.uint8(0x80), out=codes)
    return scale, -128 * scale


def _k_scales(raw: Bytes) -> tuple[Floats, Floats]:
    """Scales and biases of the eight groups of Q4_K and Q5_K: 6 bits each, times one of the block."""
    columns = np.ascontiguousarray(raw[:, :16].T)  # long rows are several times faster
    low, middle, high = columns[4:8], columns[8:12], columns[12:16]
    scales = np.concatenate((low & 63, (high & 15) | ((low >> 2) & 48)))
    minima = np.concatenate((middle & 63, (high >> 4) | ((middle >> 2) & 48)))
    return (_half(raw[:, :2])[:, 0] * scales).T, (-_half(raw[:, 2:4])[:, 0] * minima).T


def _q4_k(raw: Bytes, codes: Bytes) -> Scales:
    _split(raw[:, 16:].reshape(-1, 4, 32), codes)
    return _k_scales(raw)


def _q5_k(raw: Bytes, codes: Bytes) -> Scales:
    fifth, pairs = _lanes(raw, 16, 48), _lanes(raw, 48, 176).reshape(4, 1, 4, -1)
    lanes = np.concatenate((pairs, pairs >> np.uint64(4)), axis=1).reshape(8, 4, -1)
    lanes &= _NIBBLES
    bits = fifth >> np.arange(8, dtype=np.uint64)[:, np.newaxis, np.newaxis]
    bits &= _ONES
    bits <<= np.uint64(4)
    lanes |= bits
    _pack_5_bits(lanes, codes)
    return _k_scales(raw)


def _mxfp4(raw: Bytes, codes: Bytes) -> Scales:
    _split(raw[:, 1:], codes)
    return raw[:, :1], None


def _q6_k(raw: Bytes, codes: Bytes) -> Scales:
    """Eight codes at a time: 6 s of CPU for each GB, and 23 one by one."""
    pairs = _lanes(raw, 0, 128).reshape(2, 1, 2, 4, -1)
    six = np.concatenate((pairs, pairs >> np.uint64(4)), axis=1).reshape(2, 4, 4, -1)
    six &= _NIBBLES
    top = _lanes(raw, 128, 192).reshape(2, 1, 4, -1) >> _SHIFTS
    top &= np.uint64(3) * _ONES
    top <<= np.uint64(4)
    six |= top
    small = np.ascontiguousarray(raw[:, 192:208].T).view(np.int8)
    factors = _half(raw[:, 208:])[:, 0] * small
    return _eight_bits_of_six(six.reshape(16, 2, -1), factors, codes)


def _eight_bits_of_six(six: Lanes, factors: Floats, codes: Bytes) -> Scales:
    """Quantise factor * (code - 32) in groups of 32.

    six: (16, 2, n) lanes of codes, and (16, n) factors. Overwrites the codes
    Slopes and offsets are multiples of 1/256, so that four codes are computed at once in 64 bits.
    """
    least, most = _of_lanes(six, np.minimum), _of_lanes(six, np.maximum)
    ends = factors * (np.stack((least, most)).astype(np.float32) - 32)
    groups = ends.min(axis=0), ends.max(axis=0)
    # In bfloat16's 8 bits, so that scales are the same in every dtype that they are kept in.
    bias = _in_bfloat16(groups[0].reshape(8, 2, -1).min(axis=1), up=False)
    scale = _in_bfloat16((groups[1].reshape(8, 2, -1).max(axis=1) - bias) / 255, up=True)
    steps = np.divide(256, scale, out=np.zeros_like(scale), where=scale > 0).repeat(2, axis=0)
    slopes = np.rint(np.abs(factors) * steps).astype(np.uint64)[:, np.newaxis]
    offsets = np.rint((groups[0] - bias.repeat(2, axis=0)) * steps).astype(np.uint64) + np.uint64(
        128
    )
    offsets = offsets[:, np.newaxis] * np.uint64(0x0001000100010001)
    is_falling = factors < 0
    six ^= np.where(is_falling, np.uint64(63) * _ONES, np.uint64(0))[:, np.newaxis]  # 63 - code
    six -= (np.where(is_falling, 63 - most, least).astype(np.uint64) * _ONES)[:, np.newaxis]
    even = six & _EVEN
    six >>= np.uint64(8)
    six &= _EVEN
    for lanes in (even, six):
        lanes *= slopes
        lanes += offsets
    even >>= np.uint64(8)
    even &= _EVEN
    six &= ~_EVEN
    six |= even
    codes.view(np.uint64)[...] = six.reshape(32, -1).T
    return scale.T, bias.T


def _of_lanes(lanes: Lanes, pick: Callable[[Bytes, Bytes], Bytes]) -> Bytes:
    """(groups, 2, n) lanes -> (groups, n): the byte of all 16 that `pick` gives."""
    found = pick(lanes[:, 0].view(np.uint8), lanes[:, 1].view(np.uint8))
    for shift in (32, 16, 8):
        found = pick(found, (found.view(np.uint64) >> np.uint64(shift)).view(np.uint8))
    return found[:, ::8]


def _values_of(kind: str) -> Callable[[Bytes, Bytes], Scales]:
    """By llama.cpp's own dequantiser, for kinds that are rare."""

    def repack(raw: Bytes, codes: Bytes) -> Scales:
        values = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind])
        ones = np.ones((len(raw), 16), np.float32)
        return _eight_bits(values.reshape(-1, 16, 16), ones, 0 * ones, codes)

    return repack


def _eight_bits(values: Floats, factors: Floats, offsets: Floats, codes: Bytes) -> Scales:
    """Quantise factor * value + offset, of (n, 16, 16) values, in groups of 32. Overwrites values."""
    ends = np.stack((values.min(axis=2), values.max(axis=2)), axis=2)  # (n, 16, 2)
    ends = (ends * factors[:, :, np.newaxis] + offsets[:, :, np.newaxis]).reshape(-1, 8, 4)
    # In bfloat16's 8 bits, so that scales are the same in every dtype that they are kept in.
    bias = _in_bfloat16(ends.min(axis=2), up=False)
    scale = _in_bfloat16((ends.max(axis=2) - bias) / 255, up=True)
    steps = np.divide(1, scale, out=np.zeros_like(scale), where=scale > 0).repeat(2, axis=1)
    values *= (factors * steps)[:, :, np.newaxis]
    values += ((offsets - bias.repeat(2, axis=1)) * steps + 0.5)[:, :, np.newaxis]
    codes[...] = np.clip(values, 0, 255, out=values).reshape(codes.shape)
    return scale, bias


def _in_bfloat16(values: Floats, *, up: bool) -> Floats:
    """The next number above or below that bfloat16 has."""
    cut = (values.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    away = (cut.view(np.uint32) + np.uint32(0x10000)).view(np.float32)
    return np.where(cut >= values if up else cut <= values, cut, away)


REPACKINGS: Mapping[str, Repacking] = {
    "Q4_0": Repacking(4, _q4_0),
    "Q4_1": Repacking(4, _q4_1),
    "Q5_0": Repacking(5, _q5_0),
    "Q5_1": Repacking(5, _q5_1),
    "Q8_0": Repacking(8, _q8_0),
    "Q4_K": Repacking(4, _q4_k),
    "Q5_K": Repacking(5, _q5_k),
    "Q2_K": Repacking(8, _values_of("Q2_K")),
    "Q3_K": Repacking(8, _values_of("Q3_K")),
    "Q6_K": Repacking(8, _q6_k),
    "MXFP4": Repacking(4, _mxfp4, "mxfp4"),
}
INEXACT = frozenset({"Q2_K", "Q3_K", "Q6_K"})

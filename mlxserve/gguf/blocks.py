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


def _split(nibbles: Bytes, low: Bytes, high: Bytes) -> None:
    """Write the low halves of all bytes as packed 4-bit codes, and the high ones."""
    pairs = np.array(nibbles).view(np.uint16)
    for halves in (low, high):
        found = pairs & 0x0F0F
        found |= found >> 4
        halves[...] = found
        pairs >>= 4


def _pack_5_bits(codes: Bytes) -> Bytes:
    """(n, 32) codes of 5 bits -> (n, 20) bytes: eight at a time in 64 bits, joined in three steps."""
    lanes = np.ascontiguousarray(codes).view(np.uint64)
    for mask, shift, bits in (
        (0x001F001F001F001F, 8, 5),
        (0x000003FF000003FF, 16, 10),
        (0x00000000000FFFFF, 32, 20),
    ):
        high = lanes >> np.uint64(shift)
        high &= np.uint64(mask)
        high <<= np.uint64(bits)
        lanes = lanes & np.uint64(mask)
        lanes |= high
    return lanes.view(np.uint8).reshape(len(codes), 4, 8)[:, :, :5].reshape(len(codes), 20)


def _q4_0(raw: Bytes, codes: Bytes) -> Scales:
    scale = _half(raw[:, :2])
    _split(raw[:, 2:], codes[:, :8], codes[:, 8:])
    return scale, -8 * scale


def _q4_1(raw: Bytes, codes: Bytes) -> Scales:
    _split(raw[:, 4:], codes[:, :8], codes[:, 8:])
    return _half(raw[:, :2]), _half(raw[:, 2:4])


def _five(low: Bytes, fifth: Bytes) -> Bytes:
    """16 bytes of low bits and 4 of fifth bits, of 32 values."""
    codes = np.concatenate((low & 15, low >> 4), axis=1)
    codes |= np.unpackbits(fifth, axis=1, bitorder="little") << 4
    return _pack_5_bits(codes)


def _q5_0(raw: Bytes, codes: Bytes) -> Scales:
    scale = _half(raw[:, :2])
    codes[...] = _five(raw[:, 6:], raw[:, 2:6])
    return scale, -16 * scale


def _q5_1(raw: Bytes, codes: Bytes) -> Scales:
    codes[...] = _five(raw[:, 8:], raw[:, 4:8])
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
    quarters = codes.reshape(-1, 4, 2, 16)
    _split(raw[:, 16:].reshape(-1, 4, 32), quarters[:, :, 0], quarters[:, :, 1])
    return _k_scales(raw)


def _q5_k(raw: Bytes, codes: Bytes) -> Scales:
    quarters = raw[:, 48:].reshape(-1, 4, 1, 32)
    five = np.concatenate((quarters & 15, quarters >> 4), axis=2).reshape(-1, 8, 32)
    fifth = raw[:, np.newaxis, 16:48] >> np.arange(8, dtype=np.uint8)[:, np.newaxis]
    fifth &= 1
    fifth <<= 4
    five |= fifth
    codes[...] = _pack_5_bits(five.reshape(-1, 32)).reshape(codes.shape)
    return _k_scales(raw)


def _mxfp4(raw: Bytes, codes: Bytes) -> Scales:
    _split(raw[:, 1:], codes[:, :8], codes[:, 8:])
    return raw[:, :1], None


def _q6_k(raw: Bytes, codes: Bytes) -> Scales:
    low, high = raw[:, :128].reshape(-1, 2, 2, 32), raw[:, 128:192].reshape(-1, 2, 1, 32)
    six = np.empty((len(raw), 2, 2, 2, 32), np.uint8)  # half, high nibbles, part, value
    six[:, :, 0], six[:, :, 1] = low & 15, low >> 4
    top = high >> np.array([0, 2, 4, 6], np.uint8)[:, np.newaxis]
    top &= 3
    top <<= 4
    six |= top.reshape(six.shape)
    scales = _half(raw[:, 208:]) * np.ascontiguousarray(raw[:, 192:208]).view(np.int8)
    return _eight_bits(six.reshape(-1, 16, 16).astype(np.float32), scales, -32 * scales, codes)


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

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

import numpy as np
import numpy.typing as npt

GROUP_SIZE = 32
Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
# codes packed, scales and biases of each group; a block is a row of each
Repacked = tuple[Bytes, Floats, Floats]


@dataclass(frozen=True, slots=True)
class Repacking:
    """repack  (num_blocks, bytes of a block) -> the same blocks as mlx has them"""

    bits: int
    repack: Callable[[Bytes], Repacked]


def _half(raw: Bytes) -> Floats:
    """Two bytes of each block as a float, in a column."""
    return np.ascontiguousarray(raw).view(np.float16).astype(np.float32)


def _nibbles(codes: Bytes) -> tuple[Bytes, Bytes]:
    """The low halves of all bytes packed as 4-bit codes, and the high ones."""
    pairs = np.ascontiguousarray(codes).view(np.uint16)
    low = (pairs & 0x0F) | ((pairs >> 4) & 0xF0)
    high = ((pairs >> 4) & 0x0F) | ((pairs >> 8) & 0xF0)
    return low.astype(np.uint8), high.astype(np.uint8)


def _pack_5_bits(codes: Bytes) -> Bytes:
    """(n, 32) codes of 5 bits -> (n, 20) bytes: eight at a time in 64 bits, joined in three steps."""
    lanes = np.ascontiguousarray(codes).view(np.uint64)
    for mask, shift, bits in (
        (0x001F001F001F001F, 8, 5),
        (0x000003FF000003FF, 16, 10),
        (0x00000000000FFFFF, 32, 20),
    ):
        low, high = lanes & np.uint64(mask), (lanes >> np.uint64(shift)) & np.uint64(mask)
        lanes = low | (high << np.uint64(bits))
    return lanes.view(np.uint8).reshape(len(codes), 4, 8)[:, :, :5].reshape(len(codes), 20)


def _q4_0(raw: Bytes) -> Repacked:
    scale = _half(raw[:, :2])
    return np.concatenate(_nibbles(raw[:, 2:]), axis=1), scale, -8 * scale


def _q4_1(raw: Bytes) -> Repacked:
    return np.concatenate(_nibbles(raw[:, 4:]), axis=1), _half(raw[:, :2]), _half(raw[:, 2:4])


def _five(low: Bytes, fifth: Bytes) -> Bytes:
    """16 bytes of low bits and 4 of fifth bits, of 32 values."""
    codes = np.concatenate((low & 15, low >> 4), axis=1)
    codes |= np.unpackbits(fifth, axis=1, bitorder="little") << 4
    return _pack_5_bits(codes)


def _q5_0(raw: Bytes) -> Repacked:
    scale = _half(raw[:, :2])
    return _five(raw[:, 6:], raw[:, 2:6]), scale, -16 * scale


def _q5_1(raw: Bytes) -> Repacked:
    return _five(raw[:, 8:], raw[:, 4:8]), _half(raw[:, :2]), _half(raw[:, 2:4])


def _q8_0(raw: Bytes) -> Repacked:
    scale = _half(raw[:, :2])
    return raw[:, 2:] ^ np.uint8(0x80), scale, -128 * scale


def _k_scales(raw: Bytes) -> tuple[Floats, Floats]:
    """Scales and biases of the eight groups of Q4_K and Q5_K: 6 bits each, times one of the block."""
    low, middle, high = raw[:, 4:8], raw[:, 8:12], raw[:, 12:16]
    scales = np.concatenate((low & 63, (high & 15) | ((low >> 2) & 48)), axis=1)
    minima = np.concatenate((middle & 63, (high >> 4) | ((middle >> 2) & 48)), axis=1)
    return _half(raw[:, :2]) * scales, -_half(raw[:, 2:4]) * minima


def _q4_k(raw: Bytes) -> Repacked:
    low, high = _nibbles(raw[:, 16:])
    codes = np.stack((low.reshape(-1, 4, 16), high.reshape(-1, 4, 16)), axis=2)
    return codes.reshape(len(raw), 128), *_k_scales(raw)


def _q5_k(raw: Bytes) -> Repacked:
    quarters = raw[:, 48:].reshape(-1, 4, 1, 32)
    codes = np.concatenate((quarters & 15, quarters >> 4), axis=2).reshape(-1, 8, 32)
    fifth = raw[:, np.newaxis, 16:48] >> np.arange(8, dtype=np.uint8)[:, np.newaxis]
    codes |= (fifth & 1) << 4
    return _pack_5_bits(codes.reshape(-1, 32)).reshape(len(raw), 160), *_k_scales(raw)


REPACKINGS: Mapping[str, Repacking] = {
    "Q4_0": Repacking(4, _q4_0),
    "Q4_1": Repacking(4, _q4_1),
    "Q5_0": Repacking(5, _q5_0),
    "Q5_1": Repacking(5, _q5_1),
    "Q8_0": Repacking(8, _q8_0),
    "Q4_K": Repacking(4, _q4_k),
    "Q5_K": Repacking(5, _q5_k),
}

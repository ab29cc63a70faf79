"""Repacks GGUF's blocks as mlx's quantised weights, without dequantising what need not be.

A block of 32 values with one scale and one offset is mlx's affine quantisation in groups of 32:
w = scale * code + bias. Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K and Q5_K are such blocks, so their codes are
only put into another order: exact with float32 scales. In float16, scales of Q4_K and Q5_K (products of
two numbers) are rounded by at most 2^-11; those of the others are float16 in the file and stay exact.
IQ4_NL and IQ4_XS have 4 bits for 16 values from -127 to 113, which 8 bits have as they are. MXFP4 is
mlx's mxfp4. Q2_K, Q3_K and Q6_K have groups of 16, which mlx has not: they become 8 bits in groups of 32,
Q3_K exactly, Q2_K and Q6_K with an error of 0.5 % (rms). For all others see `grids.py`.

Codes are packed little-endian, first value lowest, as `mx.quantize` does. Layouts: ggml-common.h and
ggml-quants.c of llama.cpp.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

from mlxserve.hub.gguf import grids, groups_of_16
from mlxserve.hub.gguf.lanes import (
    ONES,
    Bytes,
    Floats,
    Halves,
    Lanes,
    columns,
    copied,
    fields,
    halves,
    lanes,
)
from mlxserve.hub.gguf.scales import Scale

GROUP_SIZE = 32
_SIX, _FOUR, _TWO = (np.uint32(0x01010101 * bits) for bits in (0b111111, 0b1111, 0b110000))
_EACH_TWO = np.arange(0, 16, 2, dtype=np.uint16)[:, np.newaxis]
_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


@dataclass(frozen=True, slots=True)
class Repacking:
    """How one kind of block is repacked.

    repack  takes (num_blocks, bytes of a block), writes the codes and returns scales: (num_blocks,
    groups of a
            block), or 1 for all; and biases, as (2, num_blocks, groups), where they do not follow
            from scales
    zero    the code of 0, where all groups have the same one: their bias is scale * -zero
    """

    bits: int
    repack: Callable[[Bytes, Bytes], Scale]
    zero: int = 0
    mode: str = "affine"

    @property
    def form(self) -> tuple[int, str]:
        """Tensors of one form can be joined."""
        return self.bits, self.mode


def _half(raw: Bytes, at: int) -> Halves:
    return raw[:, at : at + 2].view(np.float16)


def _scale_and_bias(raw: Bytes) -> Halves:
    """Scales and biases of blocks that begin with both as float16."""
    return raw[:, :4].view(np.float16).T[:, :, np.newaxis]


def _split(nibbles: Bytes, size: int, codes: Bytes) -> None:
    """Write the low nibbles of every `size` bytes as packed 4-bit codes, then the high ones.

    nibbles: (blocks, bytes), contiguous, and overwritten
    """
    pairs = nibbles.view(np.uint16)
    # What is stored of a block at once is one number of 8 or 16 bytes: single bytes take several times as long.
    half = np.uint64 if size == 16 else np.complex128
    stored = codes.view(half).reshape(-1, 2)
    low = pairs & 0x0F0F
    low |= low >> 4
    stored[:, 0] = low.astype(np.uint8).view(half).reshape(-1)
    pairs &= 0xF0F0
    # The upper byte: the high halves of both.
    pairs *= 17
    pairs >>= 8
    stored[:, 1] = pairs.astype(np.uint8).view(half).reshape(-1)


def _pack_5_bits(codes_of_8: Lanes, codes: Bytes) -> None:
    """Pack (groups, 4, n) lanes of eight codes into (n, groups * 20) bytes. Overwrites the lanes.

    Eight 5-bit codes in 64 bits are joined in three steps to 40: in 16, then 32, then 64 bits the
    lower half is moved up to the upper one (n + 7 * n is n << 3), which leaves them 21 bits above
    the lane's end. The 160 bits of four lanes are stored as three numbers.
    """
    pairs = codes_of_8.view(np.uint16)
    pairs += (pairs & np.uint16(0xFF)) * np.uint16(7)
    fours = codes_of_8.view(np.uint32)
    fours += (fours & np.uint32(0xFFFF)) * np.uint32(63)
    lower = codes_of_8 & np.uint64(0xFFFFFFFF)
    codes_of_8 ^= lower
    lower <<= np.uint64(12)
    codes_of_8 |= lower
    first, second, third, fourth = codes_of_8.swapaxes(0, 1)
    start = first >> np.uint64(21) | second << np.uint64(19)
    middle = second >> np.uint64(45) | third >> np.uint64(5) | fourth << np.uint64(35)
    end = (fourth >> np.uint64(29)).astype(np.uint32)
    for group in range(len(codes_of_8)):  # one array for all takes three times as long
        row = codes[:, 20 * group : 20 * group + 20]
        row[:, :8].view(np.uint64)[:, 0] = start[group]
        row[:, 8:16].view(np.uint64)[:, 0] = middle[group]
        row[:, 16:].view(np.uint32)[:, 0] = end[group]


def _q4_0(raw: Bytes, codes: Bytes) -> Halves:
    _split(copied(raw, 2), 16, codes)
    return _half(raw, 0)


def _q4_1(raw: Bytes, codes: Bytes) -> Halves:
    _split(copied(raw, 4), 16, codes)
    return _scale_and_bias(raw)


def _five(raw: Bytes, fifth: int, nibbles: int, codes: Bytes) -> None:
    """Pack 32 5-bit values; `fifth` and `nibbles` are offsets of 4 and 16 bytes in a block."""
    bits = np.unpackbits(columns(raw, fifth, fifth + 4), axis=1, bitorder="little")
    codes5 = bits.view(np.uint64)
    codes5 <<= np.uint64(4)
    codes5 |= fields(lanes(raw, nibbles, nibbles + 16), 4).reshape(4, -1)
    _pack_5_bits(codes5[np.newaxis], codes)


def _q5_0(raw: Bytes, codes: Bytes) -> Halves:
    _five(raw, 2, 6, codes)
    return _half(raw, 0)


def _q5_1(raw: Bytes, codes: Bytes) -> Halves:
    _five(raw, 4, 8, codes)
    return _scale_and_bias(raw)


def _q8_0(raw: Bytes, codes: Bytes) -> Halves:
    np.bitwise_xor(copied(raw, 2).view(np.uint64), 0x80 * ONES, out=codes.view(np.uint64))
    return _half(raw, 0)


def _k_scales(raw: Bytes) -> Floats:
    """Scales and biases of the eight groups of Q4_K and Q5_K: 6 bits each, times a block scale."""
    low, middle, high = np.ascontiguousarray(raw[:, 4:16].view(np.uint32).T)
    six = np.empty((2, len(raw), 2), np.uint32)  # two values in each four bytes
    six[:, :, 0] = low & _SIX, middle & _SIX
    six[:, :, 1] = (
        (high & _FOUR) | ((low >> 2) & _TWO),
        ((high >> 4) & _FOUR) | ((middle >> 2) & _TWO),
    )
    six_bits = six.view(np.uint8).astype(np.float32)
    for factors, of_block in zip(six_bits, (halves(raw, 0), -halves(raw, 2)), strict=True):
        factors *= np.repeat(of_block, 8).reshape(factors.shape)
    return six_bits


def _q4_k(raw: Bytes, codes: Bytes) -> Floats:
    _split(copied(raw, 16), 32, codes)
    return _k_scales(raw)


def _q5_k(raw: Bytes, codes: Bytes) -> Floats:
    lanes5 = fields(lanes(raw, 48, 176).reshape(4, 4, -1), 4).reshape(8, 4, -1)
    lanes5 |= fields(lanes(raw, 16, 48), 1, 4)
    _pack_5_bits(lanes5, codes)
    return _k_scales(raw)


@cache
def _iq4_pairs() -> npt.NDArray[np.uint32]:
    """Table from two bytes to the four codes of their nibbles: the low ones, then the high ones."""
    codes = np.array(_IQ4, np.int16).astype(np.uint8) + np.uint8(128)
    first, second = np.arange(1 << 16) & 255, np.arange(1 << 16) >> 8
    four = np.stack(
        [codes[nibble] for nibble in (first & 15, second & 15, first >> 4, second >> 4)], 1
    )
    return four.view(np.uint32)[:, 0]


def _split_iq4(nibbles: Bytes, codes: Bytes) -> None:
    """Write the codes of IQ4 nibbles; `nibbles` is contiguous, 16 bytes per group."""
    # An index in brackets takes twice as long, one of 16 bits or checked for its range half as long again.
    pairs = _iq4_pairs().take(nibbles.view(np.uint16).astype(np.intp), mode="wrap")
    stored = codes.view(np.complex128).reshape(-1, 2)
    stored[:, 0] = pairs.astype(np.uint16).view(np.complex128).reshape(-1)
    pairs >>= 16
    stored[:, 1] = pairs.astype(np.uint16).view(np.complex128).reshape(-1)


def _iq4_nl(raw: Bytes, codes: Bytes) -> Halves:
    _split_iq4(copied(raw, 2), codes)
    return _half(raw, 0)


def _iq4_xs(raw: Bytes, codes: Bytes) -> Floats:
    _split_iq4(copied(raw, 8), codes)
    low = columns(raw, 4, 8)
    high = (raw[:, 2:4].view(np.uint16).T >> _EACH_TWO).astype(np.uint8)
    high &= 3
    high <<= 4
    high[::2] |= low & 15
    high[1::2] |= low >> 4
    scale: Floats = halves(raw, 0) * (high.view(np.int8) - np.int8(32))
    return scale.T


def _mxfp4(raw: Bytes, codes: Bytes) -> Bytes:
    _split(copied(raw, 1), 16, codes)
    return raw[:, :1]


REPACKINGS: Mapping[str, Repacking] = {
    "Q4_0": Repacking(4, _q4_0, 8),
    "Q4_1": Repacking(4, _q4_1),
    "Q5_0": Repacking(5, _q5_0, 16),
    "Q5_1": Repacking(5, _q5_1),
    "Q8_0": Repacking(8, _q8_0, 128),
    "Q4_K": Repacking(4, _q4_k),
    "Q5_K": Repacking(5, _q5_k),
    "Q2_K": Repacking(8, groups_of_16.q2_k),
    "Q3_K": Repacking(8, groups_of_16.q3_k, 128),
    "Q6_K": Repacking(8, groups_of_16.q6_k, 128),
    "IQ4_NL": Repacking(8, _iq4_nl, 128),
    "IQ4_XS": Repacking(8, _iq4_xs, 128),
    "MXFP4": Repacking(4, _mxfp4, mode="mxfp4"),
    **{kind: Repacking(8, repack, 128) for kind, repack in grids.IN_8_BITS.items()},
    **{kind: Repacking(2, repack, 1) for kind, repack in grids.IN_2_BITS.items()},
}
INEXACT = frozenset({"Q2_K", "Q6_K"}) | grids.INEXACT

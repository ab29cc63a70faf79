"""Lanes: repacking GGUF's blocks eight bytes at a time.

A lane is eight bytes in 64 bits. Arrays of lanes have the blocks last: numpy computes long rows
several times as fast as many short ones, and copies eight bytes as fast as one.

The same steps as operations of mlx take 1.4 to 1.8 times as much CPU on x86: 0.8 s for a GB of Q4_K
where numpy takes 0.44, 1.5 and 1.1 for Q5_K, 3.0 and 1.8 for Q2_K; the codes of Q4_K by mx.compile,
which needs a compiler there, 0.5 and 0.2. Loops over bytes that numba compiles take 0.3 for these
codes and 1.0 for Q5_K's, after 0.8 s for its import. To measure it again, let malloc keep its
memory as weights.py does; otherwise numpy takes four times as long.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Halves = npt.NDArray[np.float16]
Lanes = npt.NDArray[np.uint64]
Words = TypeVar("Words", Bytes, Lanes)

ONES = np.uint64(0x0101010101010101)


def copied(raw: Bytes, start: int) -> Bytes:
    """Copy each block from byte `start` on: (blocks, bytes), contiguous.

    Items of that size are copied: one memmove per block takes half the time of rows of numbers.
    """
    cut = raw[:, start:]
    return np.ascontiguousarray(cut.view(f"V{cut.shape[1]}")).view(np.uint8)


def lanes(raw: Bytes, start: int, end: int) -> Lanes:
    """Return bytes `start` to `end` of each block as (lanes, blocks)."""
    return np.ascontiguousarray(raw[:, start:end].view(np.uint64).T)


def halves(raw: Bytes, at: int) -> Floats:
    """Return the float16 at byte `at` of each block: (blocks,)."""
    return raw[:, at : at + 2].view(np.float16)[:, 0].astype(np.float32)


def columns(raw: Bytes, start: int, end: int) -> Bytes:
    """Return bytes `start` to `end` of each block: (bytes, blocks)."""
    return np.ascontiguousarray(raw[:, start:end].T)


def fields(values: Words, width: int, at: int = 0) -> Words:
    """Split each byte into fields of `width` bits: (..., 8 / width, lanes, blocks), lowest first.

    values: (..., lanes, blocks). A field begins at bit `at` of its byte afterwards, a multiple of
        the width, and all other bits are 0.
    """
    starts = np.arange(0, 8, width, dtype=values.dtype).reshape(-1, 1, 1)
    masks = ((1 << width) - 1) * ONES.astype(values.dtype) << starts
    parts = values[..., np.newaxis, :, :] & masks
    there = at // width
    parts[..., :there, :, :] <<= at - starts[:there]
    parts[..., there + 1 :, :, :] >>= starts[there + 1 :] - at
    return parts

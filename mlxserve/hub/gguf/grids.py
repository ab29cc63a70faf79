"""Repacks blocks whose values come from tables (IQ1 to IQ3), are ternary (TQ) or have groups of 16 (NVFP4).

`gguf`'s dequantiser has the tables. Where all 32 values of a group are whole multiples of a number that the block
tells, codes are these multiples and nothing is lost: IQ1_S, IQ2_XXS, IQ3_XXS and IQ3_S in 8 bits, TQ1_0 and TQ2_0 in 2.
IQ1_M, IQ2_XS, IQ2_S and NVFP4 have two scales in a group; they get 8 bits of the largest value, with an error of at
most 0.4 % of it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from mlxserve.hub.gguf.lanes import Bytes, Floats, Halves

_GROUP = 32
_LIMIT = 127  # of a whole number in 8 bits with a sign
Unit = Callable[[Bytes, Floats], Floats]


def _scale(raw: Bytes) -> Floats:
    scale: Floats = raw[:, :2].view(np.float16).astype(np.float32)
    return scale


def _largest(_: Bytes, values: Floats) -> Floats:
    """The unit of values that are no multiples of one number."""
    unit: Floats = np.abs(values).max(axis=2) / np.float32(_LIMIT)
    return unit


def _iq2_xxs(raw: Bytes, _: Floats) -> Floats:
    high = raw[:, 2:].copy().view(np.uint32)[:, 1::2] >> 28
    unit: Floats = _scale(raw) * (high.astype(np.float32) + np.float32(0.5)) * np.float32(0.25)
    return unit


def _iq3_xxs(raw: Bytes, _: Floats) -> Floats:
    high = raw[:, 66:].copy().view(np.uint32) >> 28
    unit: Floats = _scale(raw) * (high.astype(np.float32) + np.float32(0.5)) * np.float32(0.5)
    return unit


def _iq3_s(raw: Bytes, _: Floats) -> Floats:
    four = raw[:, 106:110]
    high = np.stack((four & 15, four >> 4), axis=2).reshape(len(raw), -1)
    unit: Floats = _scale(raw) * (1 + 2 * high.astype(np.float32))
    return unit


def _iq1_s(raw: Bytes, _: Floats) -> Floats:
    high = (raw[:, 34:50].copy().view(np.uint16) >> 12) & 7
    # Values have an eighth added or taken away.
    unit: Floats = _scale(raw) * (1 + 2 * high.astype(np.float32)) / np.float32(8)
    return unit


def _values(raw: Bytes, kind: str) -> Floats:
    """Return values as (blocks, groups, 32)."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    values: Floats = dequantize(raw, GGMLQuantizationType[kind]).astype(np.float32)
    return values.reshape(len(raw), -1, _GROUP)


def _in_8_bits(raw: Bytes, codes: Bytes, *, kind: str, unit: Unit) -> Floats:
    """Write signed multiples of each group's unit, and return the units."""
    values = _values(raw, kind)
    with np.errstate(all="ignore"):
        units = unit(raw, values)
        multiples = np.nan_to_num(np.rint(values / units[:, :, np.newaxis]), posinf=0, neginf=0)
    codes[...] = (multiples.reshape(len(raw), -1) + 128).astype(np.uint8)
    return units


def _in_2_bits(raw: Bytes, codes: Bytes, *, kind: str) -> Halves:
    """Write values of -1 to 2 scales, one more; the scale of all groups ends the block."""
    whole = raw.copy()
    whole[:, -2:] = np.array([1], np.float16).view(np.uint8)
    fours = (_values(whole, kind) + 1).astype(np.uint8).reshape(len(raw), -1, 4)
    codes[...] = fours[:, :, 0] | fours[:, :, 1] << 2 | fours[:, :, 2] << 4 | fours[:, :, 3] << 6
    scale: Halves = raw[:, -2:].copy().view(np.float16)
    return scale


UNITS: dict[str, Unit] = {
    "IQ1_S": _iq1_s,
    "IQ2_XXS": _iq2_xxs,
    "IQ3_XXS": _iq3_xxs,
    "IQ3_S": _iq3_s,
    **dict.fromkeys(("IQ1_M", "IQ2_XS", "IQ2_S", "NVFP4"), _largest),
}
INEXACT = frozenset(kind for kind, unit in UNITS.items() if unit is _largest)
IN_8_BITS = {kind: partial(_in_8_bits, kind=kind, unit=unit) for kind, unit in UNITS.items()}
IN_2_BITS = {kind: partial(_in_2_bits, kind=kind) for kind in ("TQ1_0", "TQ2_0")}

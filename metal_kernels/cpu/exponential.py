"""2^x and tanh: on a CPU from operations that a compiler vectorises, elsewhere mlx's own.

mlx's Linux wheel computes `exp` and `tanh` one element at a time: 15 ns each on a 2-core x86 box,
three quarters of a long prompt's attention. Additions and multiplications take 0.25 ns.
"""

from __future__ import annotations

import math
from functools import partial

import mlx.core as mx

LOG2_E = 1 / math.log(2)

# 2^r for |r| <= 1/2, highest power first; from Cephes' exp2f. Relative error below 2e-7.
_POLYNOMIAL = (
    1.535336188319500e-4,
    1.339887440266574e-3,
    9.618437357674640e-3,
    5.550332471162809e-2,
    2.402264791363012e-1,
    6.931472028550421e-1,
    1.0,
)
# A float32 below 2^22 plus this has no bits left for a fraction: the sum's last bits are the rounded
# integer. The low 9 bits of the constant itself are zero.
_ROUNDING = 1.5 * 2**23
_EXPONENT_BITS = 23  # where a float32's exponent begins
# The first gives a 0 for masked scores. 2^-126, the smallest normal number, would make most products
# with values denormal, which x86 computes a hundred times slower: 16 decodes over a shared prefix took
# 50 ms of a layer, and take 5.
_SMALLEST, _LARGEST = -127.0, 126.0
_ZERO = mx.array(0.0)


def exp2(x: mx.array, minus: mx.array = _ZERO) -> mx.array:
    """2^(x - minus) of float32, relative error 3e-7.

    On a CPU at most 2^126; below -126 less than 2^-126, and from -127 on 0.
    """
    if mx.default_device() != mx.cpu:
        return mx.exp((x - minus) / LOG2_E)
    fraction, rounded = _split(x, minus)
    return _scale(fraction.view(mx.int32), rounded.view(mx.int32)).view(mx.float32)


def tanh(x: mx.array) -> mx.array:
    """The hyperbolic tangent of float32, absolute error 2e-7."""
    if mx.default_device() != mx.cpu:
        return mx.tanh(x)
    return 1 - 2 / (exp2(2 * LOG2_E * x) + 1)


# Two functions, because mlx fuses a change of type only for fixed shapes.
@partial(mx.compile, shapeless=True)
def _split(x: mx.array, minus: mx.array) -> tuple[mx.array, mx.array]:
    """2^(x - its rounded value), and that value with its bits where `_ROUNDING` moves them."""
    x = mx.minimum(mx.maximum(x - minus, _SMALLEST), _LARGEST)
    rounded = x + _ROUNDING
    rest = x - (rounded - _ROUNDING)
    power = mx.array(_POLYNOMIAL[0])
    for coefficient in _POLYNOMIAL[1:]:
        power = power * rest + coefficient
    return power, rounded


@partial(mx.compile, shapeless=True)
def _scale(bits: mx.array, rounded_bits: mx.array) -> mx.array:
    """Add the rounded value to a float's exponent."""
    return bits + mx.left_shift(rounded_bits, mx.array(_EXPONENT_BITS, mx.int32))

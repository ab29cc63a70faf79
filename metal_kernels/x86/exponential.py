"""Vectorisable 2^x, tanh and sigmoid for CPUs.

mlx's Linux wheel computes `exp`, `tanh` and `sigmoid` one element at a time: 15 to 20 ns each on a
2-core x86 box, three quarters of a long prompt's attention. Additions and multiplications take 0.25
ns. On another device 2^x and tanh are mlx's own.
"""

from __future__ import annotations

import math
from functools import partial

import mlx.core as mx

LOG2_E = 1 / math.log(2)

# 2^r for |r| <= 1/2, lowest power first: fitted with 1 for r = 0. Relative error below 2e-7 in float32.
_POLYNOMIAL = (
    1.0,
    6.931469776e-1,
    2.402224209e-1,
    5.550733743e-2,
    9.671512643e-3,
    1.326472718e-3,
)
# A float32 below 2^22 plus this has no bits left for a fraction: the sum's last bits are the rounded
# integer. The low 9 bits of the constant itself are zero.
_ROUNDING = 1.5 * 2**23
_EXPONENT_BITS = 23  # first bit of a float32's exponent
# The first gives a 0 for masked scores. 2^-126, the smallest normal number, would make most products
# with values denormal, which x86 computes a hundred times slower: 16 decodes over a shared prefix took
# 50 ms of a layer, and take 5.
_SMALLEST, _LARGEST = -127.0, 126.0
_ZERO = mx.array(0.0)

# tanh(u) is about u O(u^2) / E(u^2) for |u| <= 1.3, lowest power first: fitted so that the error of the ratio of
# E - u O to E + u O, which is e^(-2u), is below 4e-9 everywhere.
_ODD = (0.9999999851480339, 0.11034106600171147, 0.001009338009760974)
_EVEN = (1.0, 0.44367422050312405, 0.015568054800827935)
_FURTHEST = 1.3  # bound of u
# e^(-x) is e^(-2u) to the 8th power, with u = x / 16.
_SQUARINGS = 3


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


def sigmoid(x: mx.array) -> mx.array:
    """1 / (1 + e^-x) of float32. Relative error 8e-6 down to x = -20.8, and 1e-9 below it.

    Unlike `exp2` it changes no type, so that `mx.compile` fuses it with what is around it.
    """
    u = mx.minimum(mx.maximum(x * (0.5 / (1 << _SQUARINGS)), -_FURTHEST), _FURTHEST)
    square = u * u
    odd, even = u * _polynomial(_ODD, square), _polynomial(_EVEN, square)
    above, below = even + odd, even - odd
    for _ in range(_SQUARINGS):
        above, below = above * above, below * below
    return above / (above + below)


def _polynomial(coefficients: tuple[float, ...], x: mx.array) -> mx.array:
    """Evaluate a polynomial; coefficients lowest power first."""
    total = mx.array(coefficients[-1])
    for coefficient in coefficients[-2::-1]:
        total = total * x + coefficient
    return total


# Two functions, because mlx fuses a change of type only for fixed shapes.
@partial(mx.compile, shapeless=True)
def _split(x: mx.array, minus: mx.array) -> tuple[mx.array, mx.array]:
    """Return 2^(x - its rounded value), and that value with its bits at `_ROUNDING`'s place."""
    x = mx.minimum(mx.maximum(x - minus, _SMALLEST), _LARGEST)
    rounded = x + _ROUNDING
    rest = x - (rounded - _ROUNDING)
    return _polynomial(_POLYNOMIAL, rest), rounded


@partial(mx.compile, shapeless=True)
def _scale(bits: mx.array, rounded_bits: mx.array) -> mx.array:
    """Add the rounded value to a float's exponent."""
    return bits + mx.left_shift(rounded_bits, mx.array(_EXPONENT_BITS, mx.int32))

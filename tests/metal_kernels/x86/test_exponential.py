"""Powers of two, the hyperbolic tangent and the sigmoid, against float64."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from metal_kernels.x86.exponential import exp2, sigmoid, tanh

pytestmark = pytest.mark.usefixtures("compiled")


@pytest.mark.parametrize("bounds", [(-126, 0), (-1, 1), (0, 126)], ids=str)
def test_a_power_of_two_is_right_to_a_rounding(bounds: tuple[int, int]) -> None:
    x = np.random.default_rng(3).uniform(*bounds, 20_000).astype(np.float32)
    found = np.array(exp2(mx.array(x)), np.float64)
    assert np.abs(found / np.exp2(x.astype(np.float64)) - 1).max() < 3e-7


def test_whole_powers_are_exact() -> None:
    x = np.arange(-126, 127, dtype=np.float32)
    assert np.array_equal(np.array(exp2(mx.array(x))), np.exp2(x))


def test_a_large_exponent_is_clamped() -> None:
    x = mx.array([126.0, 127.0, 1e30, np.inf])
    assert np.array_equal(np.array(exp2(x)), np.full(4, np.float32(2.0) ** 126))


def test_a_masked_score_is_zero() -> None:
    assert np.array_equal(np.array(exp2(mx.array([-np.inf, -1e30, -128.0, -127.0]))), np.zeros(4))


def test_between_the_smallest_normal_number_and_zero_it_is_tiny() -> None:
    found = np.array(exp2(mx.array(np.linspace(-127, -126, 1_000, dtype=np.float32))))
    assert (found >= 0).all()
    assert (found <= np.float32(2.0) ** -126).all()


def test_what_is_subtracted_is_subtracted_first() -> None:
    largest = mx.array([[1000.0], [-1000.0]])
    found = exp2(mx.array([[1000.0, 990.0], [-1003.0, -np.inf]]), largest)
    assert np.array_equal(np.array(found), [[1, 2**-10], [2**-3, 0]])


def test_a_tangent_is_right_to_a_few_roundings() -> None:
    x = np.random.default_rng(4).uniform(-30, 30, 20_000).astype(np.float32)
    found = np.array(tanh(mx.array(x)), np.float64)
    assert np.abs(found - np.tanh(x.astype(np.float64))).max() < 3e-7


@pytest.mark.parametrize(("furthest", "error"), [(1, 1e-6), (5, 2e-6), (20.8, 1e-5)])
def test_a_sigmoid_is_right_to_a_few_roundings(furthest: float, error: float) -> None:
    x = np.random.default_rng(5).uniform(-furthest, furthest, 20_000).astype(np.float32)
    found = np.array(sigmoid(mx.array(x)), np.float64)
    assert np.abs(found * (1 + np.exp(-x.astype(np.float64))) - 1).max() < error


def test_a_sigmoid_ends_at_one_and_next_to_zero() -> None:
    found = np.array(sigmoid(mx.array([20.8, 100.0, np.inf, -20.8, -100.0, -np.inf])))
    assert np.array_equal(found[:3], np.ones(3))
    assert (found[3:] > 0).all()
    assert (found[3:] < 1.1e-9).all()
    assert np.isnan(np.array(sigmoid(mx.array([np.nan])))).all()


def test_every_shape_is_accepted() -> None:
    for shape in ((1,), (3, 5), (2, 1, 7)):
        assert np.array_equal(np.array(exp2(mx.zeros(shape))), np.ones(shape, np.float32))

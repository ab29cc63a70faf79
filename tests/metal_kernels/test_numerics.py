"""Rows are within rounding at the shapes of 23 families; six of them in the slow suite."""

from __future__ import annotations

import pytest

from metal_kernels.metal import MetalBackend
from tests.metal_kernels.numerics import FAMILIES, SHAPES, Shape

_SLOW_EVERY = 34


def test_the_shapes_are_those_of_23_families_in_every_format() -> None:
    assert len(FAMILIES) == 23
    assert len(SHAPES) == 192
    kinds = {shape.kind for shape in SHAPES}
    formats = ("bfloat16", "float16", "float32", "q8")
    assert kinds == {f"{op}, {each}" for op in ("decodes", "chunks") for each in formats}
    assert 3 * sum(shape.is_checked for shape in SHAPES) >= len(SHAPES)


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(shape, marks=pytest.mark.long if n % _SLOW_EVERY else pytest.mark.slow)
        for n, shape in enumerate(SHAPES)
    ],
    ids=str,
)
def test_rows_are_at_rounding(
    shape: Shape, fast_backend: MetalBackend, checked_backend: MetalBackend
) -> None:
    units = shape.units_off(checked_backend if shape.is_checked else fast_backend)
    assert units <= shape.bound

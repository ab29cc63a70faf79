"""Attention and products over many rows are cut into blocks, whose values are those of one call."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlxserve.model.image_encoder_pieces import TowerPieces

_NUM = 100
_HEADS, _SIZE = 2, 16
_WORK = _HEADS * _NUM * 2 * _SIZE * 25  # of 25 queries


@pytest.fixture(autouse=True)
def seed() -> None:
    mx.random.seed(0)


def _masks() -> dict[str, Any]:
    later = mx.arange(_NUM)[:, None] >= mx.arange(_NUM)
    return {
        "no mask": None,
        "a mask of each query": later[None, None],
        "an additive mask": mx.where(later, 0.0, -1e4)[None, None],
        "a mask of the keys": (mx.arange(_NUM) < 70)[None, None, None],
    }


@pytest.mark.parametrize("mask", _masks())
def test_attention_is_cut_into_blocks_of_queries(mask: str) -> None:
    q, k, v = (mx.random.normal((1, _HEADS, _NUM, _SIZE)) for _ in range(3))
    options = {"scale": 0.25, "mask": _masks()[mask]}
    expected = mx.fast.scaled_dot_product_attention(q, k, v, **options)
    pieces = TowerPieces(nn.Module(), _WORK)
    with pieces.collecting() as outputs:
        found = mx.fast.scaled_dot_product_attention(q, k, v, **options)
    assert [output.shape[2] for output in outputs] == [25] * 4
    assert mx.allclose(found, expected, rtol=1e-5, atol=1e-5)
    with pieces.collecting() as outputs:
        mx.fast.scaled_dot_product_attention(q, k, v, scale=1, mask="causal")
    assert len(outputs) == 1  # a mask by its name is not cut


def test_products_and_convolutions_are_cut_into_blocks_of_rows() -> None:
    whole = nn.Module()
    whole.product = nn.Linear(32, 48)
    whole.packed = nn.QuantizedLinear(64, 48, group_size=32)
    whole.patches = nn.Conv2d(3, 48, kernel_size=4, stride=4)
    whole.layers = [nn.Module()]
    whole.layers[0].mlp = nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 32))
    rows = mx.random.normal((2, 200, 32))
    wide = mx.random.normal((400, 64))
    patches = mx.random.normal((400, 4, 4, 3))
    given = [
        (whole.product, rows),
        (whole.packed, wide),
        (whole.patches, patches),
        (whole.layers[0].mlp, rows),
    ]
    alone = [module(x) for module, x in given]
    pieces = TowerPieces(whole, 32 * 48 * 100)
    for (module, x), expected in zip(given, alone, strict=True):
        with pieces.collecting() as outputs:
            found = module(x)
        assert len(outputs) >= 4
        blocks = [len(output) for output in outputs if output.shape != found.shape]
        assert sum(blocks) == 400
        assert max(blocks) <= 100
        assert found.shape == expected.shape
        assert mx.allclose(found, expected, rtol=1e-5, atol=1e-5)
        assert mx.array_equal(module(x), expected)  # while no tower is called


def test_many_small_products_end_a_piece_together() -> None:
    whole = nn.Module()
    whole.product = nn.Linear(32, 48)
    pieces = TowerPieces(whole, 10 * 32 * 48)
    with pieces.collecting() as outputs:
        for _ in range(20):
            whole.product(mx.zeros((4, 32)))
    assert len(outputs) == 6

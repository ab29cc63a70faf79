"""A layer writes to the slots of a step, and each row attends over the pages of its own sequence."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlxserve.cache.kv import LayerSpec
from mlxserve.cache.layer_kv import LayerKV, PagedWindow
from mlxserve.cache.layout import StepLayout
from tests.cache.pools import SPECS, pool_with_history, rows, tables

# A decode at position 17 of pages (2, 0), and a chunk of positions 0..4 of page 3.
POSITIONS = np.array([17, 0, 1, 2, 3], np.int32)
SLOTS = np.array([1, 48, 49, 50, 51], np.int32)


def mixed_step() -> StepLayout:
    return StepLayout(mx.array(POSITIONS), SLOTS, 1, tables([2, 0], 18, 1), tables([3], 4, 4))


def attend(layer: LayerKV, spec: LayerSpec, mask: object = None) -> np.ndarray:
    keys, values = rows(5, spec, seed=40)
    layer.update_and_fetch(keys[:, :, None], values[:, :, None])
    queries = mx.random.normal((5, 2, 1, spec.key_dim), key=mx.random.key(50))
    output = layer.attend(queries, scale=0.5, mask=mask)
    assert output.shape == (5, 2, 1, spec.value_dim)
    return np.array(output[:, :, 0])


def expected(layer: int, window: int | None) -> np.ndarray:
    """The five rows' attention, computed without pages."""
    spec = SPECS[layer]
    new = [np.array(side) for side in rows(5, spec, seed=40)]
    old = [np.array(side) for side in rows(17, spec, seed=layer)]
    queries = np.array(mx.random.normal((5, 2, 1, spec.key_dim), key=mx.random.key(50)))[:, :, 0]
    outputs = []
    for row in range(5):
        sides = [
            np.concatenate([o, n[:1]]) if row == 0 else n[1 : row + 1]
            for o, n in zip(old, new, strict=True)
        ]
        keys, values = (side[-(window or len(side)) :] for side in sides)
        heads = []
        for head in range(2):
            kv_head = head * spec.kv_heads // 2
            scores = keys[:, kv_head] @ queries[row, head] * 0.5
            weights = np.exp(scores - scores.max())
            heads.append(weights / weights.sum() @ values[:, kv_head])
        outputs.append(heads)
    return np.array(outputs)


def test_decodes_and_chunks_of_one_step_attend_over_their_own_pages() -> None:
    layer = LayerKV(pool_with_history(), 0, mixed_step())
    assert np.allclose(attend(layer, SPECS[0]), expected(0, None), atol=1e-5)


def test_a_layer_with_a_window_attends_over_the_window_only() -> None:
    layer = LayerKV(pool_with_history(), 1, mixed_step())
    assert np.allclose(attend(layer, SPECS[1]), expected(1, 3), atol=1e-5)


def test_a_window_passed_as_a_mask_is_used() -> None:
    layer = LayerKV(pool_with_history(), 0, mixed_step())
    mask = layer.make_mask(1, window_size=2)
    assert np.allclose(attend(layer, SPECS[0], mask), expected(0, 2), atol=1e-5)


def test_a_mask_narrower_than_the_layers_window_is_used() -> None:
    layer = LayerKV(pool_with_history(), 1, mixed_step())
    mask = layer.make_mask(1, window_size=2)
    assert np.allclose(attend(layer, SPECS[1], mask), expected(1, 2), atol=1e-5)


def test_a_layer_writes_into_its_own_arrays_and_slots_only() -> None:
    kv = pool_with_history()
    before = [np.array(array) for array in kv.arrays()]
    attend(LayerKV(kv, 1, mixed_step()), SPECS[1])
    after = [np.array(array) for array in kv.arrays()]
    keys, values = (np.array(side) for side in rows(5, SPECS[1], seed=40))
    before[1][:, SLOTS] = keys.swapaxes(0, 1)
    before[3][:, SLOTS] = values.swapaxes(0, 1)
    assert all(np.array_equal(a, b) for a, b in zip(after, before, strict=True))


def test_the_offset_is_the_position_of_every_row() -> None:
    layer = LayerKV(pool_with_history(), 0, mixed_step())
    assert np.array_equal(np.array(layer.offset), POSITIONS)


def test_rows_need_a_mask_only_for_a_window_that_is_not_the_layers() -> None:
    kv, step = pool_with_history(), mixed_step()
    plain, windowed = LayerKV(kv, 0, step), LayerKV(kv, 1, step)
    assert plain.make_mask(1) is None
    assert plain.make_mask(1, return_array=True) is None
    assert windowed.make_mask(1, window_size=3) is None
    assert plain.make_mask(1, window_size=3) == PagedWindow(3)


def test_a_mask_for_longer_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="rows of a paged step have length 1, got 2"):
        LayerKV(pool_with_history(), 0, mixed_step()).make_mask(2)


@pytest.mark.parametrize("mask", [mx.ones((1, 1)), "causal"], ids=["array", "str"])
def test_a_mask_made_by_the_model_is_refused(mask: object) -> None:
    layer = LayerKV(pool_with_history(), 0, mixed_step())
    with pytest.raises(ValueError, match="a mask of the model's own"):
        attend(layer, SPECS[0], mask)

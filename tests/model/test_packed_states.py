"""States as one array for each dtype, and as bytes."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlxserve.model.packed_states import Packing, Stack, StateSpec

SPECS = [
    StateSpec((((2,), mx.float32), ((3, 2), mx.bfloat16))),
    StateSpec((((0, 4), mx.bfloat16), ((2, 2), mx.float32))),
    StateSpec((((5,), mx.int32),)),
]


def stack(batch: int) -> Stack:
    """Every element another number."""
    layers, first = [], 0
    for spec in SPECS:
        layer = []
        for shape, dtype in spec.arrays:
            size = batch * int(np.prod(shape))
            layer.append(mx.arange(first, first + size).reshape(batch, *shape).astype(dtype))
            first += size
        layers.append(layer)
    return layers


def test_a_row_is_one_array_for_each_dtype_and_comes_back() -> None:
    packing = Packing(SPECS)
    whole = stack(3)
    for row in range(3):
        packed = packing.pack(whole, row)
        assert [(array.dtype, array.shape) for array in packed] == [
            (mx.float32, (6,)),
            (mx.bfloat16, (6,)),
            (mx.int32, (5,)),
        ]
        for layer, before in zip(packing.unpack(packed), whole, strict=True):
            for array, rows in zip(layer, before, strict=True):
                assert array.dtype == rows.dtype
                assert array.shape == (1, *rows.shape[1:])
                assert mx.array_equal(array[0], rows[row])


def test_bytes_are_the_arrays_layer_by_layer() -> None:
    packing = Packing(SPECS)
    whole = stack(2)
    payload = packing.to_bytes(packing.pack(whole, 1))
    assert payload == b"".join(
        bytes(np.array(array[1].reshape(-1).view(mx.uint8))) for layer in whole for array in layer
    )
    assert len(payload) == sum(spec.nbytes for spec in SPECS)
    for array, again in zip(packing.pack(whole, 1), packing.from_bytes(payload), strict=True):
        assert array.dtype == again.dtype
        assert mx.array_equal(array, again)


def test_bytes_of_another_model_are_an_error() -> None:
    packing = Packing(SPECS)
    payload = packing.to_bytes(packing.pack(stack(1), 0))
    with pytest.raises(AssertionError, match="another model"):
        packing.from_bytes(payload + b"\0")


def test_what_is_packed_does_not_keep_the_stack_in_memory() -> None:
    """Also of a dtype with one array alone, where nothing is joined."""
    spec = StateSpec((((1_000,), mx.float32), ((500,), mx.float16)))
    packing = Packing([spec])
    before = mx.get_active_memory()
    rows = [mx.ones((100, *shape), dtype) for shape, dtype in spec.arrays]
    mx.eval(rows)
    packed = packing.pack([rows], 7)
    mx.eval(packed)
    del rows
    assert mx.get_active_memory() - before < 3 * spec.nbytes


def test_a_model_without_states_packs_nothing() -> None:
    packing = Packing([])
    assert packing.pack([], 0) == []
    assert packing.unpack([]) == []
    assert packing.to_bytes([]) == b""
    assert packing.from_bytes(b"") == []

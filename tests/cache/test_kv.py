"""The arrays of a pool: written, read, copied, resized, and backed with memory as need grows."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import mlx.core as mx
import numpy as np
import pytest

from metal_kernels.choice import select_backend
from metal_kernels.reference import ReferenceBackend
from metal_kernels.x86.backend import X86Backend
from mlxserve.cache.kv import Backends, KVPool, LayerSpec
from mlxserve.cache.layer_kv import LayerKV
from mlxserve.cache.layout import StepLayout
from tests.cache.pools import SPECS, pool_with_history, rows, tables
from tests.emulated import emulated_backend


def test_the_size_of_a_pool_is_that_of_its_layers() -> None:
    kv = KVPool(SPECS, num_pages=4, page_size=16, backends=select_backend("cpu"))
    assert [spec.bytes_per_token() for spec in SPECS] == [128, 48]
    assert kv.nbytes == 4 * 16 * (128 + 48)


def test_in_8_bits_a_number_takes_a_byte_and_a_row_4_more() -> None:
    specs = [replace(spec, is_quantised=True) for spec in SPECS]
    assert [spec.bytes_per_token() for spec in specs] == [2 * (12 + 12), 12 + 8]
    kv = KVPool(specs, num_pages=4, page_size=16, backends=select_backend("cpu"))
    assert kv.nbytes == kv.nbytes_of(4) == 4 * 16 * (48 + 20)
    kv.resize(7)
    kv.check()
    usual = LayerSpec(kv_heads=8, key_dim=128, value_dim=128, dtype=mx.float16)
    in_8_bits = replace(usual, is_quantised=True)
    assert usual.bytes_per_token() / in_8_bits.bytes_per_token() == pytest.approx(1.94, abs=0.01)


@pytest.mark.parametrize("is_quantised", [False, True], ids=["own", "q8"])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16], ids=str)
def test_pages_that_were_read_are_written_bit_by_bit_to_other_pages(
    dtype: mx.Dtype, is_quantised: bool
) -> None:
    specs = [
        LayerSpec(2, key_dim=8, value_dim=8, dtype=dtype, is_quantised=is_quantised),
        LayerSpec(1, key_dim=8, value_dim=4, dtype=dtype, window=3, is_quantised=is_quantised),
    ]
    pools = [
        KVPool(specs, num_pages=5, page_size=16, backends=select_backend("cpu")) for _ in range(2)
    ]
    slots = np.arange(5 * 16, dtype=np.int32)
    step = StepLayout(mx.arange(80), slots, 0, None, tables([0, 1, 2, 3, 4], 80, 80))
    for index, spec in enumerate(specs):
        keys, values = rows(80, spec, seed=index)
        pools[0].write(index, keys.astype(dtype), values.astype(dtype), step)
    payloads = pools[0].read_units([3, 0, 4])
    assert len(set(payloads)) == 3
    assert {len(p) for p in payloads} == {16 * sum(spec.bytes_per_token() for spec in specs)}
    pools[1].write_units([1, 2, 0], payloads)
    assert pools[1].read_units([1, 2, 0]) == payloads
    assert pools[1].read_units([0, 1, 2, 3]) == [
        *payloads[2:],
        *payloads[:2],
        bytes(len(payloads[0])),
    ]


def test_keys_and_values_that_a_kernel_wrote_in_place_are_read_as_written() -> None:
    backend = emulated_backend()
    keys, values = mx.random.normal((2, 33, 2, 64), key=mx.random.key(1))
    pools = [backend.new_pool(4, 2, 16, 64, mx.float32) for _ in range(2)]
    slots = np.array([*range(16, 32), *range(48, 64), 3], np.int32)
    backend.write_kv(keys, values, *pools, slots)
    read_keys, read_values = backend.read_kv(*pools, slots)
    assert mx.array_equal(read_keys, keys).item()
    assert mx.array_equal(read_values, values).item()


def test_pages_are_copied_and_others_stay_unchanged() -> None:
    kv = pool_with_history()
    before = kv.read_units(range(4))
    kv.copy_pages([2, 2], [1, 3])
    assert kv.read_units(range(4)) == [before[0], before[2], before[2], before[2]]


# ---- resizing


def each_its_own() -> Backends:
    """One layer on the kernels, and one whose shape they do not take on plain mlx."""
    return [emulated_backend(), X86Backend()]


BACKENDS = pytest.mark.parametrize(
    "backends",
    [ReferenceBackend, X86Backend, emulated_backend, each_its_own],
    ids=["reference", "cpu", "metal", "each its own"],
)


def filled(backends: Backends, num_pages: int, dtype: mx.Dtype = mx.float32) -> KVPool:
    """A pool of two layers with different numbers in every slot."""
    of_layers = backends if isinstance(backends, Sequence) else [backends] * 2
    specs = [
        LayerSpec(heads, *((64, 64) if backend.name == "metal" else (8, 4)), dtype)
        for backend, heads in zip(of_layers, (2, 1), strict=True)
    ]
    kv = KVPool(specs, num_pages, 16, backends)
    num_slots = num_pages * 16
    step = StepLayout(mx.arange(num_slots), np.arange(num_slots, dtype=np.int32), 0, None, None)
    for index, spec in enumerate(specs):
        keys, values = rows(num_slots, spec, seed=index)
        kv.write(index, keys.astype(dtype), values.astype(dtype), step)
    return kv


@BACKENDS
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
def test_a_larger_pool_keeps_pages_bit_by_bit_and_a_smaller_one_none(
    backends: Callable[[], Backends], dtype: mx.Dtype
) -> None:
    kv = filled(backends(), 4, dtype)
    before = kv.read_units(range(4))
    kv.resize(9)
    blank = bytes(len(before[0]))
    assert kv.read_units(range(9)) == [*before, *[blank] * 5]
    assert kv.nbytes == kv.nbytes_of(9) == 9 * 16 * sum(s.bytes_per_token() for s in kv.specs)
    kv.write_units([8, 0], [before[1], before[2]])
    kv.copy_pages([8], [4])
    assert kv.read_units([0, 4]) == [before[2], before[1]]
    kv.resize(3)
    assert kv.read_units(range(3)) == [blank] * 3
    assert kv.nbytes == kv.nbytes_of(3)
    kv.check()


def test_a_layer_without_values_is_resized_like_any_other() -> None:
    """As an index over keys has none: its array of values has pages, and no bytes."""
    specs = [LayerSpec(kv_heads=1, key_dim=8, value_dim=0, dtype=mx.float32)]
    kv = KVPool(specs, 4, 16, select_backend("cpu"), num_backed=2)
    for resize in (partial(kv.back, 4), partial(kv.resize, 9), partial(kv.shrink, 6)):
        resize()
        kv.check()
        slots = np.arange(kv.num_backed * 16, dtype=np.int32)
        step = StepLayout(mx.array(slots), slots, 0, None, None)
        kv.write(0, *rows(len(slots), specs[0], seed=3), step)
    assert kv.num_backed == 6


@BACKENDS
def test_a_layer_attends_over_the_pages_of_a_larger_pool(
    backends: Callable[[], Backends],
) -> None:
    """The kernels' order of reads and writes continues in the new arrays."""
    kv = filled(backends(), 6)
    spec = kv.specs[0]
    queries = mx.random.normal((1, 2, 1, spec.key_dim), key=mx.random.key(9))
    new = [side[:, :, None] for side in rows(1, spec, seed=8)]

    def answer(page_table: list[int]) -> np.ndarray:
        decode = tables(page_table, 18, 1)
        slot = np.array([page_table[1] * 16 + 1], np.int32)
        layer = LayerKV(kv, 0, StepLayout(mx.array([17]), slot, 1, decode, None))
        layer.update_and_fetch(*new)
        return np.array(layer.attend(queries, scale=0.5))

    wanted = answer([5, 1])
    kv.resize(9)
    kv.copy_pages([5], [8])
    assert np.allclose(answer([8, 1]), wanted, atol=1e-6)


@pytest.mark.parametrize("backends", [X86Backend, emulated_backend], ids=["cpu", "metal"])
def test_a_pool_that_shrinks_returns_its_memory_to_the_machine(
    backends: Callable[[], Backends],
) -> None:
    kv = filled(backends(), 512)
    whole, array = kv.nbytes, max(a.nbytes for a in kv.arrays())
    mx.eval(kv.arrays())
    gc.collect()  # what earlier tests left
    mx.clear_cache()
    active = mx.get_active_memory()
    mx.reset_peak_memory()
    kv.resize(128)
    assert mx.get_active_memory() + mx.get_cache_memory() <= active - 0.75 * whole + 4096
    assert mx.get_peak_memory() <= active + (64 << 10), "the old pool is given up first"
    mx.reset_peak_memory()
    kv.resize(512)
    assert mx.get_active_memory() == pytest.approx(active, abs=4096)
    assert mx.get_peak_memory() <= active + array + (64 << 10), "more than one array existed twice"


def test_resizing_to_the_same_size_keeps_the_arrays() -> None:
    kv = pool_with_history()
    arrays = kv.arrays()
    kv.resize(4)
    assert all(one is other for one, other in zip(kv.arrays(), arrays, strict=True))


# ---- memory that grows with need


@BACKENDS
def test_backing_more_pages_keeps_those_that_were_written(backends: Callable[[], Backends]) -> None:
    whole = filled(backends(), 3)
    wanted = whole.read_units(range(3))
    kv = KVPool(whole.specs, 9, 16, whole.backends, num_backed=3)
    kv.write_units(range(3), wanted)
    assert kv.nbytes == kv.nbytes_of(3)
    kv.back(2)
    assert kv.num_backed == 3
    kv.back(5)
    assert (kv.num_pages, kv.num_backed, kv.nbytes) == (9, 5, kv.nbytes_of(5))
    blank = bytes(len(wanted[0]))
    assert kv.read_units(range(5)) == [*wanted, blank, blank]
    kv.copy_pages([0], [4])
    assert kv.read_units([4]) == [wanted[0]]
    kv.check()


@BACKENDS
def test_a_resize_of_a_growing_pool_keeps_what_has_memory(backends: Callable[[], Backends]) -> None:
    whole = filled(backends(), 4)
    wanted = whole.read_units(range(4))
    kv = KVPool(whole.specs, 9, 16, whole.backends, num_backed=4)
    kv.write_units(range(4), wanted)
    kv.resize(20)
    assert (kv.num_pages, kv.num_backed) == (20, 4)
    assert kv.read_units(range(4)) == wanted
    kv.resize(6)
    assert (kv.num_pages, kv.num_backed) == (6, 4)
    kv.resize(3)
    assert (kv.num_pages, kv.num_backed) == (3, 3)
    kv.resize(5)
    assert (kv.num_pages, kv.num_backed) == (5, 5)
    kv.restart(8)
    assert (kv.num_pages, kv.num_backed) == (8, 4)
    kv.check()


@BACKENDS
def test_a_written_step_is_in_the_arrays_that_replace_its_own(
    backends: Callable[[], Backends],
) -> None:
    """The next step may be launched, and the pool grow, before the step is read."""
    spec = LayerSpec(2, 64, 64, mx.float32)
    kv = KVPool([spec] * 2, 6, 16, backends(), num_backed=2)
    keys, values = rows(16, spec, seed=5)
    slots = np.arange(16, 32, dtype=np.int32)
    for layer in range(2):
        kv.write(layer, keys, values, StepLayout(mx.arange(16), slots, 0, None, None))
    kv.back(6)  # nothing was evaluated yet
    found = np.frombuffer(kv.read_units([1])[0], np.float32)
    assert set(found) == set(np.array(keys).ravel()) | set(np.array(values).ravel())

"""Lazy zeros are zeros, in reused memory too, and take no memory until they are used."""

from __future__ import annotations

import resource
import sys
import threading
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from metal_kernels.cpu.zeros import lazy_zeros

SHAPES = [(3, 70_000, 5), (1 << 20,), (2, 3)]


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16, mx.int32], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_they_are_zeros(shape: tuple[int, ...], dtype: mx.Dtype) -> None:
    zeros = lazy_zeros(shape, dtype)
    assert (zeros.shape, zeros.dtype) == (shape, dtype)
    assert not np.array(zeros.astype(mx.float32)).any()


def test_reused_memory_is_zeros() -> None:
    for _ in range(20):  # sizes that malloc takes from what was freed
        used = mx.full((1 << 19,), 7.0)
        mx.eval(used)
        del used
        assert not np.array(lazy_zeros((1 << 19,), mx.float32)).any()


def test_written_elements_stay_and_their_neighbours_are_zeros() -> None:
    zeros = lazy_zeros((1 << 20,), mx.float32)
    zeros[1000:1010] = mx.ones(10)
    found = np.array(zeros)
    assert found.sum() == 10
    assert found[1000:1010].all()


@pytest.mark.skipif(sys.platform != "linux", reason="other systems' memory is taken at once")
def test_mlx_has_let_go_of_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one of its threads still refers to ends a process that ends at that moment."""
    load, held = mx.load, []

    def load_and_hold(file: object, **options: str) -> object:
        held.append(file)
        threading.Timer(0.1, held.clear).start()
        return load(file, **options)  # type: ignore[call-overload]

    monkeypatch.setattr(mx, "load", load_and_hold)
    lazy_zeros((1 << 20,), mx.float32)
    assert not held


@pytest.mark.skipif(sys.platform != "linux", reason="other systems' memory is taken at once")
def test_no_memory_is_taken_until_it_is_used() -> None:
    before = resident()
    zeros = lazy_zeros((1 << 26,), mx.float32)
    assert resident() - before < 16 << 20 < zeros.nbytes
    zeros[: 1 << 23] = mx.ones(1 << 23)
    mx.eval(zeros)
    assert 32 << 20 <= resident() - before < 96 << 20

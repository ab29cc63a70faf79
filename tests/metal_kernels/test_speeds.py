"""Speeds of attention and writes: rates, and how many ops are launched for each wait."""

from __future__ import annotations

from collections import Counter
from typing import Any

import mlx.core as mx
import pytest

from metal_kernels.choice import select_backend
from metal_kernels.metal import MetalBackend
from metal_kernels.ops import Backend
from metal_kernels.speeds import Speeds, TimedAttention, dense_seconds, measure, paged_seconds
from tests.emulated import emulated_backend


def test_bandwidth_is_measured_in_gigabytes_per_second(fast_backend: MetalBackend) -> None:
    speeds = measure(fast_backend, batch=2, context=64, kv_heads=2, head_dim=64, repeats=1)
    assert speeds.decode > 0
    assert speeds.write_pages > 0
    assert speeds.write_tokens > 0


def test_several_ops_are_launched_for_each_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = emulated_backend()
    called: Counter[str] = Counter()
    for op in ("paged_decode", "write_kv", "settle"):

        def counted(*arguments: Any, _op: str = op, **options: Any) -> Any:
            called[_op] += 1
            return getattr(MetalBackend, _op)(backend, *arguments, **options)

        monkeypatch.setattr(backend, op, counted)
    measure(backend, batch=1, context=64, kv_heads=2, head_dim=64, repeats=1, queued=3)
    assert called == {"paged_decode": 6, "write_kv": 12, "settle": 4}


def test_the_gain_of_whole_pages_is_a_ratio() -> None:
    assert Speeds(decode=1.0, write_pages=12.0, write_tokens=4.0).page_gain == 3.0


DECODE = TimedAttention(context=75, batch=2, kv_heads=2, head_dim=64, dtype=mx.float32)
CHUNK = TimedAttention(context=75, rows=9, kv_heads=2, head_dim=64, dtype=mx.float32)


@pytest.mark.parametrize("what", [DECODE, CHUNK])
@pytest.mark.parametrize("name", ["cpu", "metal"])
def test_an_op_of_any_backend_is_timed(name: str, what: TimedAttention) -> None:
    backend: Backend = emulated_backend() if name == "metal" else select_backend("cpu")
    called = Counter[str]()
    for op in ("paged_decode", "paged_prefill"):

        def counted(*arguments: Any, _op: str = op, **options: Any) -> Any:
            called[_op] += 1
            return getattr(type(backend), _op)(backend, *arguments, **options)

        setattr(backend, op, counted)
    assert paged_seconds(backend, what, repeats=1, queued=3) > 0
    assert called == {"paged_decode" if what.rows == 1 else "paged_prefill": 6}


@pytest.mark.parametrize("what", [DECODE, CHUNK])
def test_attention_over_contiguous_keys_is_timed(
    what: TimedAttention, monkeypatch: pytest.MonkeyPatch
) -> None:
    masks = []
    real = mx.fast.scaled_dot_product_attention

    def attention(q: mx.array, k: mx.array, v: mx.array, **options: Any) -> mx.array:
        assert q.shape == (what.batch, 8, what.rows, 64)
        assert k.shape == v.shape == (what.batch, 2, 75, 64)
        masks.append(options["mask"])
        return real(q, k, v, **options)

    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", attention)
    assert dense_seconds(what, repeats=1, queued=2) > 0
    assert masks == [None if what.rows == 1 else "causal"] * 4


def test_a_decode_reads_its_keys_and_values_once() -> None:
    assert DECODE.kv_bytes == 2 * 2 * 75 * 2 * 64 * 4

"""The figures of attention: each is a rate on both sides, or absent with the reason."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import mlx.core as mx
import pytest

from metal_kernels.kernels import Kernel, KernelSpec
from metal_kernels.metal import MetalBackend
from metal_kernels.speeds import (
    TimedAttention,
    latent_seconds,
    memory_bandwidth,
    paged_seconds,
)
from metal_kernels.x86.backend import X86Backend
from mlxserve.doctor import attention_speeds as module
from mlxserve.doctor.attention_speeds import Task, attention_speeds, tasks
from tests.emulated import emulated_factory

GROWN = 64 << 20
DECODE = TimedAttention(context=75, kv_heads=2, head_dim=64, dtype=mx.float32)


@pytest.fixture(autouse=True)
def little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "memory_bandwidth", partial(memory_bandwidth, nbytes=1 << 20))


def test_ours_and_mlx_attention_are_timed_on_the_same_task() -> None:
    bandwidth, found = attention_speeds([Task("a decode", "GB/s", DECODE, DECODE.kv_bytes / 1e9)])
    assert bandwidth.unit == "GB/s"
    assert bandwidth.ours is not None
    assert bandwidth.ours > 0.1
    assert (found.name, found.unit, found.absent) == ("a decode", "GB/s", None)
    assert found.ours is not None
    assert found.mlx_lm is not None
    assert min(found.ours, found.mlx_lm) > 0


def test_one_that_does_not_run_is_absent_and_the_other_is_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(*_arguments: object) -> float:
        raise RuntimeError("[metal::Device] Unable to build metal library\nerror: x")

    monkeypatch.setattr(module, "paged_seconds", refused)
    monkeypatch.setattr(module, "dense_seconds", lambda *_arguments: 0.5)
    _, found = attention_speeds([Task("a decode", "GB/s", DECODE, 3.0)])
    assert (found.ours, found.mlx_lm) == (None, 6.0)
    assert found.absent == "mlxserve: [metal::Device] Unable to build metal library"


def every_task() -> list[Task]:
    return list(tasks(mx.float16, mx.bfloat16, GROWN))


def test_what_is_unknown_on_a_mac_is_asked() -> None:
    asked = [task.what for task in every_task() if not task.is_latent]
    decodes = [what for what in asked if what.rows == 1]
    chunks = [what for what in asked if what.rows > 1]
    assert {1024, 8192, 32768} <= {what.context for what in decodes if what.batch == 1}
    assert {(512, 512), (2048, 2048)} <= {(what.context, what.rows) for what in chunks}
    for context in (8192, 32768):
        behind = [what for what in chunks if what.context == context]
        assert {what.by_tiles for what in behind} == {False, True}
        assert any(what.by_tiles and what.is_quantised for what in behind)
        assert any(what.is_quantised for what in decodes if what.context == context)
    for is_quantised in (False, True):
        groups = {what.group for what in decodes if what.is_quantised == is_quantised}
        assert {1, 4, 8, 16} <= groups
    assert {what.dtype for what in asked} == {mx.float16, mx.bfloat16}
    assert {task.what.rows for task in every_task() if task.is_latent} == {1, 512}
    assert [what.pool_bytes for what in decodes].count(GROWN) == 1
    names = [task.name for task in every_task()]
    assert len(set(names)) == len(names)


def test_chunks_of_every_head_dimension_of_models_are_asked_in_every_way() -> None:
    """So the first report decides what a trial at load decides for one model."""
    asked = [task.what for task in every_task() if not task.is_latent]
    for head_dim in (64, 128, 256, 512):
        for rows in (64, 256):
            of_rows = [w for w in asked if (w.head_dim, w.rows) == (head_dim, rows)]
            asked_ways = ["by_tiles", "by_copies"]
            asked_ways += ["is_cooperative"] if head_dim <= 256 else []
            asked_ways += ["by_blocks"] if head_dim >= 256 else []
            ways = ("by_tiles", "by_copies", "is_cooperative", "by_blocks")
            found = [[way for way in ways if getattr(w, way)] for w in of_rows]
            assert found == [[way] for way in asked_ways]
        assert any(w.rows == 1 for w in asked if w.head_dim == head_dim)


def test_all_of_it_fits_beside_contiguous_keys_on_a_machine_with_8_gb() -> None:
    assert max(task.what.kv_bytes for task in every_task()) < 300e6


@pytest.mark.parametrize(
    ("what", "kernel"),
    [
        (TimedAttention(300, rows=260, kv_heads=1, head_dim=64), "gather_pages"),
        (TimedAttention(300, rows=260, kv_heads=1, head_dim=64, by_tiles=True), "paged_prefill"),
        (TimedAttention(75, kv_heads=1, head_dim=64, group=2, is_quantised=True), "paged_decode"),
        (TimedAttention(75, kv_heads=1, head_dim=64, group=8), "grouped_decode"),
    ],
    ids=["copies", "tiles", "q8", "group"],
)
def test_the_kernel_that_is_named_is_the_one_that_is_timed(
    what: TimedAttention, kernel: str
) -> None:
    ran: list[str] = []
    make = emulated_factory()

    def factory(spec: KernelSpec, source: str) -> Kernel:
        ran.append(spec.name)
        return make(spec, source)

    assert paged_seconds(MetalBackend(factory), what, repeats=1, queued=1) > 0
    assert kernel in ran


def test_a_whole_pool_is_as_large_as_it_is_said_to_be() -> None:
    what = TimedAttention(100, kv_heads=2, head_dim=64, pool_bytes=GROWN)
    assert what.num_pages * 32 * what.token_bytes == GROWN
    assert replace(what, pool_bytes=0).num_pages == 4


def test_latents_are_timed() -> None:
    what = TimedAttention(40, rows=3, group=2, dtype=mx.float32)
    assert latent_seconds(X86Backend(), what, repeats=1, queued=1) > 0

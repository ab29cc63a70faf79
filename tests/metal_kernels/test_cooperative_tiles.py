"""Tiles of cooperative tensors: right at every shape, for chunks of enough rows, and only where a trial passed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeAlias

import mlx.core as mx
import numpy as np
import pytest

from metal_kernels import cooperative_tiles, cooperative_trial, long_chunks
from metal_kernels.chunk_trial import ROWS, ChunkTimes, WayTimes, time_chunks
from metal_kernels.cooperative_tiles import use_timed
from metal_kernels.cooperative_trial import why_not_cooperative
from metal_kernels.kernels import Kernel, KernelSpec
from metal_kernels.long_chunks import CopiedChunks
from metal_kernels.metal import MetalBackend
from metal_kernels.ops import Attention
from metal_kernels.speeds import TimedAttention
from tests.emulated import emulated_factory
from tests.metal_kernels.numerics import BOUNDS, UNITS
from tests.metal_kernels.oracle import Case, Paged

LAYER = TimedAttention(4096, kv_heads=1, head_dim=64, group=3, dtype=mx.float16)


def recorded(*, check: bool = False) -> tuple[MetalBackend, list[str]]:
    """Emulated kernels, and the names of those that ran."""
    ran: list[str] = []
    make = emulated_factory(check=check)

    def recording(spec: KernelSpec, source: str) -> Kernel:
        kernel = make(spec, source)

        def call(**arguments: Any) -> list[mx.array]:
            ran.append(spec.name)
            return kernel(**arguments)

        return call

    return MetalBackend(recording), ran


Take: TypeAlias = Callable[[int], None]


@pytest.fixture
def take(monkeypatch: pytest.MonkeyPatch) -> Take:
    """Let the kernel take all chunks of so many rows, as if that had been timed."""

    def from_rows(first: int) -> None:
        monkeypatch.setattr(cooperative_tiles, "timed_rows", {})
        for head_dim in cooperative_tiles.HEAD_DIMS:
            for dtype in cooperative_tiles.DTYPES:
                use_timed(head_dim, dtype, first)

    return from_rows


HALF, BRAIN = {"dtype": mx.float16}, {"dtype": mx.bfloat16}
OPTIONS: list[dict[str, Any]] = [
    {**HALF},
    {**BRAIN, "key_dim": 128, "value_dim": 128, "group": 3, "window": 21},
    {**HALF, "key_dim": 256, "value_dim": 256, "group": 8, "kv_heads": 1, "has_sinks": True},
    {**BRAIN, "softcap": 2.0, "page_size": 32, "group": 1},
    {**HALF, "is_quantised": True, "key_dim": 128, "value_dim": 128, "page_size": 64},
    {**HALF, "images": ((0, 3), (3, 20), (40, 59)), "window": 30},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_chunks_are_right_with_every_check(options: dict[str, Any], take: Take) -> None:
    """Chunks of a few lines and of several tiles, whose keys end within 32; unused slots hold NaN."""
    take(1)
    backend, ran = recorded(check=True)
    paged = Paged(backend, Case(((0, 5), (37, 70), (100, 33)), **options))
    assert paged.error() / UNITS[options["dtype"]] <= BOUNDS[options["dtype"]][1]
    assert ran[-1] == "cooperative_prefill"


def test_chunks_of_fewer_rows_keep_the_other_kernel_and_answers_are_alike(take: Take) -> None:
    take(33)
    backend, ran = recorded()
    paged = Paged(backend, Case(((7, 33), (9, 32), (50, 40)), dtype=mx.float16))
    pools, tables = paged.pools(), paged.tables
    ran.clear()
    queries = mx.random.normal((105, 4, 64), key=mx.random.key(1)).astype(mx.float16)
    together = backend.paged_prefill(queries, *pools, tables, Attention(0.1))
    assert ran == ["cooperative_prefill", "paged_prefill", "cooperative_prefill"]
    alone = replace(
        tables,
        page_tables=tables.page_tables[2:],
        context_lens=tables.context_lens[2:],
        query_starts=np.array([0, 40], np.int32),
    )
    answer = backend.paged_prefill(queries[65:], *pools, alone, Attention(0.1))
    assert mx.array_equal(together[65:], answer)


def test_copies_go_before_and_others_behind(take: Take, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where copies have no room for what a chunk sees, its tiles are those of cooperative tensors."""
    take(40)
    monkeypatch.setattr(long_chunks, "timed_choices", {(64, mx.float16): CopiedChunks(48)})
    monkeypatch.setattr(long_chunks, "total_memory", lambda: 32 * 64 * 2 * 64 * 2 * 2)
    backend, ran = recorded()
    paged = Paged(backend, Case(((0, 50), (30, 50), (0, 41), (0, 9)), dtype=mx.float16))
    assert paged.error() <= paged.tolerance
    assert ran[-3:] == ["gather_pages", "cooperative_prefill", "paged_prefill"]


def test_without_a_trial_no_chunk_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cooperative_tiles, "timed_rows", {})
    backend, ran = recorded()
    paged = Paged(backend, Case(((7, 70),), dtype=mx.float16))
    assert paged.error() <= paged.tolerance
    assert ran[-1] == "paged_prefill"


@pytest.fixture
def accelerators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cooperative_trial, "has_accelerators", lambda _dtype: True)


@pytest.mark.usefixtures("accelerators")
@pytest.mark.parametrize(("is_quantised", "has_ends"), [(False, False), (True, True)])
def test_the_trial_passes_where_the_lanes_are_as_mlx_has_them(
    is_quantised: bool, has_ends: bool
) -> None:
    """Without a window, with one, and with a softcap and sinks; each of them with an image, too."""
    backend, ran = recorded()
    what = replace(LAYER, is_quantised=is_quantised)
    assert why_not_cooperative(backend, what, has_ends=has_ends) is None
    assert ran.count("cooperative_prefill") == ran.count("paged_prefill") == (6 if has_ends else 3)


@pytest.mark.usefixtures("accelerators")
@pytest.mark.parametrize("is_refused", [False, True])
def test_the_text_for_images_is_tried_where_a_model_may_need_it(is_refused: bool) -> None:
    """Otherwise it would be compiled, and computed with for the first time, inside an answer."""
    make = emulated_factory()

    def factory(spec: KernelSpec, source: str) -> Kernel:
        right = make(spec, source)
        blind = make(spec, source.replace("ends[row] - 1 - my_positions[r]", "0"))

        def call(**call: Any) -> list[mx.array]:
            if spec.name != "cooperative_prefill" or ("HAS_ENDS", 1) not in call["template"]:
                return right(**call)
            if is_refused:
                raise RuntimeError("Unable to build metal library from source")
            return blind(**call)

        return call

    assert why_not_cooperative(MetalBackend(factory), LAYER, has_ends=False) is None
    reason = why_not_cooperative(MetalBackend(factory), LAYER, has_ends=True)
    assert reason is not None
    assert reason.startswith(("its results differ", "the kernel does not run: "))


@pytest.mark.usefixtures("accelerators")
def test_the_trial_fails_where_lanes_are_others_and_where_the_text_is_refused() -> None:
    """No answer is computed by a kernel that would be wrong on this machine."""
    make = emulated_factory()

    def other_lanes(spec: KernelSpec, source: str) -> Kernel:
        moved = spec.header.replace("((lane >> 2) & 2)", "((lane >> 1) & 2)")
        return make(replace(spec, header=moved), source)

    reason = why_not_cooperative(MetalBackend(other_lanes), LAYER, has_ends=False)
    assert reason is not None
    assert reason.startswith("its results differ from the other tile kernel's by ")

    def refusing(spec: KernelSpec, source: str) -> Kernel:
        if spec.name == "cooperative_prefill":
            raise RuntimeError("'MetalPerformancePrimitives.h' file not found")
        return make(spec, source)

    reason = why_not_cooperative(MetalBackend(refusing), LAYER, has_ends=False)
    assert reason == "the kernel does not run: 'MetalPerformancePrimitives.h' file not found"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"head_dim": 80}, "the kernel does not have this head dimension or dtype"),
        ({"dtype": mx.float32}, "the kernel does not have this head dimension or dtype"),
        ({}, "there are no neural accelerators"),
    ],
    ids=str,
)
@pytest.mark.skipif(mx.metal.is_available(), reason="a Mac may have neural accelerators")
def test_nothing_is_tried_where_it_would_mean_nothing(options: dict[str, Any], reason: str) -> None:
    backend, ran = recorded()
    assert why_not_cooperative(backend, replace(LAYER, **options), has_ends=True) == reason
    assert ran == []


def times_of(*ways: tuple[float, float, float]) -> ChunkTimes:
    """Of (tiles, fused copies, cooperative tensors) for each number of rows."""
    return ChunkTimes(
        {
            rows: WayTimes(tiles, fused, None, cooperative)
            for rows, (tiles, fused, cooperative) in zip(ROWS, ways, strict=True)
        }
    )


def test_cooperative_tensors_begin_where_they_are_faster_and_copies_must_beat_them() -> None:
    faster = times_of((1.0, 0.9, 0.8), (1.0, 0.9, 0.8), (1.0, 0.9, 0.8), (1.0, 0.7, 0.8))
    assert faster.first_cooperative == 32
    assert faster.choice(8) == CopiedChunks(256)
    slower = times_of((1.0, 1.1, 0.8), (1.0, 1.1, 0.8), (1.0, 0.9, 1.1), (1.0, 0.7, 0.8))
    assert slower.first_cooperative == 256
    assert slower.choice(8) == CopiedChunks(128)
    never = times_of(*[(1.0, 0.9, 0.8)] * 3, (1.0, 0.7, 1.0))
    assert never.first_cooperative is None
    assert str(faster).startswith(
        "copies from 256 rows on, cooperative tensors from 32 rows on without copies: 32, 64, 128, 256 "
        "rows take 1.00, 0.90 and 0.80, "
    )
    assert str(faster).endswith(" ms by tiles, copies and cooperative tensors")


def test_they_are_timed_beside_the_others_after_their_trial() -> None:
    timed: list[TimedAttention] = []

    def timer(_backend: MetalBackend, what: TimedAttention) -> float:
        timed.append(what)
        return 0.001

    backend, _ = recorded()
    times = time_chunks(backend, LAYER, timer, has_cooperative=True)
    assert times is not None
    assert times.by_rows == dict.fromkeys(ROWS, WayTimes(1.0, 1.0, None, 1.0))
    assert [what.is_cooperative for what in timed] == [False, False, True] * len(ROWS)
    assert not any(what.is_cooperative for what in timed if what.by_tiles or what.by_copies)

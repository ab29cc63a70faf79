"""Chunks are timed in each way, and copies are chosen from the rows on from which they are faster."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from metal_kernels import chunk_trial, long_chunks
from metal_kernels.chunk_trial import ROWS, ChunkTimes, WayTimes, time_chunks
from metal_kernels.kernels import SMALLEST_INPUT, Kernel, KernelSpec
from metal_kernels.long_chunks import CopiedChunks, copying, longest_copied, use_timed
from metal_kernels.metal import MetalBackend
from metal_kernels.ops import Attention
from metal_kernels.reading import read
from metal_kernels.rounding import TOLERANCES, row_error
from metal_kernels.speeds import TimedAttention, paged_seconds
from tests.emulated import emulated_factory

LAYER = TimedAttention(32_768, kv_heads=2, head_dim=256, group=8, dtype=mx.bfloat16)


@pytest.fixture
def no_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_chunks, "timed_choices", {})


@pytest.mark.parametrize(
    ("copies", "first"),
    [
        ((0.9, 0.9, 0.9, 0.9), 32),
        ((1.1, 0.9, 0.9, 0.9), 64),
        ((1.1, 1.1, 0.9, 0.9), 128),
        ((1.1, 1.1, 1.1, 0.9), 256),
        ((0.9, 0.9, 1.1, 0.9), 256),
        ((0.9, 1.1, 0.9, 0.9), 128),
        ((0.9, 0.9, 0.9, 1.1), None),
        ((1.0, 1.0, 1.0, 1.0), None),
    ],
)
def test_copies_begin_where_they_are_faster_for_all_more_rows(
    copies: tuple[float, ...], first: int | None
) -> None:
    """So what is planned for the largest chunk holds for the others."""
    times = ChunkTimes({rows: WayTimes(1.0, each) for rows, each in zip(ROWS, copies, strict=True)})
    assert times.choice(8) == (None if first is None else CopiedChunks(first))
    choice = "the tile kernel" if first is None else f"copies from {first} rows on"
    assert str(times).startswith(f"{choice}: 32, 64, 128, 256 rows take 1.00 and ")
    assert str(times).endswith(" ms by tiles and copies")
    unfused = ChunkTimes(
        {rows: way._replace(fused=None, unfused=way.fused) for rows, way in times.by_rows.items()}
    )
    assert unfused.choice(8) == (None if first is None else CopiedChunks(first, unfused_heads=8))


@pytest.mark.parametrize(
    ("fused", "unfused", "chosen"),
    [
        ((0.5, 0.5, 0.5, 0.9), (0.8, 0.8, 0.8, 0.8), CopiedChunks(32, unfused_heads=16)),
        ((0.5, 0.5, 0.5, 0.9), (1.1, 1.1, 0.8, 0.8), CopiedChunks(128, unfused_heads=16)),
        ((1.1, 0.5, 0.5, 0.8), (0.4, 0.4, 0.4, 0.8), CopiedChunks(64)),
        ((1.1, 1.1, 1.1, 0.9), (0.4, 0.4, 0.4, 1.1), CopiedChunks(256)),
        ((0.9, 0.9, 0.9, 1.3), (0.9, 0.9, 0.9, 1.2), None),
    ],
)
def test_of_mlxs_two_attentions_the_one_for_most_rows_takes_all_copies(
    fused: tuple[float, ...], unfused: tuple[float, ...], chosen: CopiedChunks | None
) -> None:
    """What is planned for the scores of the largest chunk holds for the others."""
    ways = zip(ROWS, fused, unfused, strict=True)
    times = ChunkTimes({rows: WayTimes(1.0, *each) for rows, *each in ways})
    assert times.choice(16) == chosen
    assert ", unfused: " in str(times) or chosen is None or chosen.unfused_heads is None
    assert f"rows take 1.00, {fused[0]:.2f} and {unfused[0]:.2f}, " in str(times)
    assert str(times).endswith(" ms by tiles, copies and copies unfused")


def no_kernel(_spec: KernelSpec, _source: str) -> Kernel:
    pytest.fail("no kernel is made")


def way_of(what: TimedAttention) -> str:
    ways = {"tiles": what.by_tiles, "fused": what.by_copies, "unfused": what.by_blocks}
    [way] = [name for name, is_asked in ways.items() if is_asked]
    return way


def test_every_way_is_timed_on_the_layers_own_shape() -> None:
    timed: list[TimedAttention] = []
    seconds = {"tiles": 0.002, "fused": 0.001, "unfused": 0.0005}

    def timer(_backend: MetalBackend, what: TimedAttention) -> float:
        timed.append(what)
        return seconds[way_of(what)]

    times = time_chunks(MetalBackend(no_kernel), LAYER, timer)
    assert times == ChunkTimes(dict.fromkeys(ROWS, WayTimes(2.0, 1.0, 0.5)))
    assert times.choice(16) == CopiedChunks(32, unfused_heads=16)
    assert [(what.rows, way_of(what)) for what in timed] == [
        (rows, way) for rows in ROWS for way in seconds
    ]
    shapes = {(w.context, w.kv_heads, w.head_dim, w.group, w.dtype) for w in timed}
    assert shapes == {(4096, 2, 256, 8, mx.bfloat16)}


def test_one_more_number_of_rows_compiles_no_kernel_and_builds_three_graphs_a_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So a start is no dearer than by the time of these chunks. MLX's own kernels are not counted."""
    small = replace(LAYER, context=64, kv_heads=1, group=1)
    compiled: set[tuple[object, ...]] = set()
    num_calls = 0

    def factory(spec: KernelSpec, _source: str) -> Kernel:
        def call(**call: Any) -> list[mx.array]:
            nonlocal num_calls
            num_calls += spec.name != "gather_pages"  # which each of MLX's two has before it
            types = [(each.dtype, each.ndim, each.size < SMALLEST_INPUT) for each in call["inputs"]]
            compiled.add((spec.name, str(call["template"]), str(types)))
            shapes, dtypes = call["output_shapes"], call["output_dtypes"]
            return [mx.zeros(*each) for each in zip(shapes, dtypes, strict=True)]

        return call

    def count(rows: tuple[int, ...]) -> int:
        nonlocal num_calls
        num_calls = 0
        monkeypatch.setattr(chunk_trial, "ROWS", rows)
        assert time_chunks(MetalBackend(factory), small, has_cooperative=True)
        return num_calls

    before, without = count(ROWS[1:2]), set(compiled)
    assert count(ROWS[:2]) - before == 3 * 2  # tiles of both kinds
    assert compiled == without


WITH_UNFUSED, WITHOUT_FUSED = {"tiles", "fused", "unfused"}, {"tiles", "unfused"}


@pytest.mark.parametrize(
    ("head_dim", "ways"),
    [
        (64, {"tiles", "fused"}),
        (128, {"tiles", "fused"}),
        (192, WITH_UNFUSED),
        (256, WITH_UNFUSED),
        (112, WITHOUT_FUSED),
        (512, WITHOUT_FUSED),
    ],
)
@pytest.mark.skipif(mx.metal.is_available(), reason="on a Mac MLX answers for its own chip")
def test_unfused_attention_is_timed_where_mlx_takes_it_unless_forced(
    head_dim: int, ways: set[str]
) -> None:
    timed: set[str] = set()

    def timer(_backend: MetalBackend, what: TimedAttention) -> float:
        timed.add(way_of(what))
        return 1.0

    assert time_chunks(MetalBackend(no_kernel), TimedAttention(4096, head_dim=head_dim), timer)
    assert timed == ways


def test_float32_is_not_timed() -> None:
    what = TimedAttention(4096, dtype=mx.float32)
    assert time_chunks(MetalBackend(no_kernel), what, lambda *_: pytest.fail("timed")) is None


def test_a_kernel_that_does_not_run_leaves_the_rule(caplog: pytest.LogCaptureFixture) -> None:
    def refuse(_backend: MetalBackend, what: TimedAttention) -> float:
        raise RuntimeError("Unable to build metal library from source")

    caplog.set_level("INFO", "metal_kernels")
    assert time_chunks(MetalBackend(no_kernel), LAYER, refuse) is None
    assert "head dimension 256 are not timed: Unable to build" in caplog.text


@pytest.mark.parametrize("head_dim", [64, 256])
def test_the_way_that_is_asked_for_is_timed(head_dim: int) -> None:
    """Whichever a chunk of these rows goes."""
    ran: list[str] = []
    make = emulated_factory()

    def factory(spec: KernelSpec, source: str) -> Kernel:
        ran.append(spec.name)
        return make(spec, source)

    for options, kernel in (
        ({"by_tiles": True}, "paged_prefill"),
        ({"by_copies": True}, "gather_pages"),
        ({"by_blocks": True}, "gather_pages"),
    ):
        what = TimedAttention(40, rows=20, kv_heads=1, head_dim=head_dim, group=1, **options)
        assert paged_seconds(MetalBackend(factory), what, repeats=1, queued=1) > 0
        assert ran[-1] == kernel


def test_both_ways_have_the_same_answer() -> None:
    backend = MetalBackend(emulated_factory())
    what = TimedAttention(75, rows=40, kv_heads=2, head_dim=256, group=2)
    pools = [backend.new_pool(what.num_pages, 2, 32, 256, what.dtype) for _ in range(2)]
    rows = mx.random.normal((75, 2, 256), key=mx.random.key(1)).astype(what.dtype)
    tables = what.tables()
    backend.write_kv(rows, rows, pools[0], pools[1], tables.slots(0, np.arange(75)))
    tiles, copies = (
        read(
            attend(what.queries(), pools[0], pools[1], tables, Attention(what.scale)).astype(
                mx.float32
            )
        )
        for attend in (backend.attend_tiles, backend.attend_copies)
    )
    assert row_error(copies, tiles) <= 2 * TOLERANCES[what.dtype]


@pytest.mark.usefixtures("no_times")
def test_what_was_timed_replaces_the_rule_and_the_first_model_decides() -> None:
    assert [longest_copied(rows, 8, 128, mx.float16) > 0 for rows in (128, 256)] == [False, True]
    use_timed(128, mx.float16, CopiedChunks(128))
    use_timed(128, mx.float16, None)
    assert [longest_copied(rows, 8, 128, mx.float16) > 0 for rows in (127, 128)] == [False, True]
    assert longest_copied(512, 8, 256, mx.bfloat16) == 0
    use_timed(256, mx.bfloat16, CopiedChunks(64))
    assert longest_copied(64, 8, 256, mx.bfloat16) > 0
    use_timed(64, mx.bfloat16, None)
    assert longest_copied(2048, 8, 64, mx.bfloat16) == 0
    assert copying(64, mx.float16) == CopiedChunks(256)

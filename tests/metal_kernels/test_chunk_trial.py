"""Chunks are timed in both ways, and copies are chosen from the rows on from which they are faster."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from metal_kernels import long_chunks
from metal_kernels.chunk_trial import ROWS, ChunkTimes, time_chunks
from metal_kernels.kernels import Kernel, KernelSpec
from metal_kernels.long_chunks import first_copied_rows, longest_copied, use_timed
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
        ((0.9, 0.9, 0.9), 64),
        ((1.1, 0.9, 0.9), 128),
        ((1.1, 1.1, 0.9), 256),
        ((0.9, 1.1, 0.9), 256),
        ((0.9, 0.9, 1.1), None),
        ((1.0, 1.0, 1.0), None),
    ],
)
def test_copies_begin_where_they_are_faster_for_all_more_rows(
    copies: tuple[float, ...], first: int | None
) -> None:
    """So what is planned for the largest chunk holds for the others."""
    times = ChunkTimes({rows: (1.0, each) for rows, each in zip(ROWS, copies, strict=True)})
    assert times.first_copied == first
    choice = "the tile kernel" if first is None else f"copies from {first} rows on"
    assert str(times).startswith(f"{choice}: 64, 128, 256 rows take 1.00 and ")


def no_kernel(_spec: KernelSpec, _source: str) -> Kernel:
    pytest.fail("no kernel is made")


def test_both_ways_are_timed_on_the_layers_own_shape() -> None:
    timed: list[TimedAttention] = []

    def timer(_backend: MetalBackend, what: TimedAttention) -> float:
        timed.append(what)
        return 0.002 if what.by_tiles else 0.001

    times = time_chunks(MetalBackend(no_kernel), LAYER, timer)
    assert times == ChunkTimes(dict.fromkeys(ROWS, (2.0, 1.0)))
    assert [(what.rows, what.by_tiles, what.by_copies) for what in timed] == [
        (rows, by_tiles, not by_tiles) for rows in ROWS for by_tiles in (True, False)
    ]
    shapes = {(w.context, w.kv_heads, w.head_dim, w.group, w.dtype) for w in timed}
    assert shapes == {(4096, 2, 256, 8, mx.bfloat16)}


@pytest.mark.parametrize(
    "options", [{"head_dim": 112}, {"head_dim": 512}, {"dtype": mx.float32}], ids=str
)
@pytest.mark.skipif(mx.metal.is_available(), reason="on a Mac MLX answers for its own chip")
def test_nothing_is_timed_where_mlx_has_no_exact_fused_kernel(options: dict[str, Any]) -> None:
    what = TimedAttention(4096, **options)
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
    use_timed(128, mx.float16, 128)
    use_timed(128, mx.float16, None)
    assert [longest_copied(rows, 8, 128, mx.float16) > 0 for rows in (127, 128)] == [False, True]
    assert longest_copied(512, 8, 256, mx.bfloat16) == 0
    use_timed(256, mx.bfloat16, 64)
    assert longest_copied(64, 8, 256, mx.bfloat16) > 0
    use_timed(64, mx.bfloat16, None)
    assert longest_copied(2048, 8, 64, mx.bfloat16) == 0
    assert first_copied_rows(64, mx.float16) == 256

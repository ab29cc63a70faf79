"""Long chunks go through copies of their pages to MLX's attention, others through the tile kernel."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from metal_kernels.kernels import KernelSpec, on_metal
from metal_kernels.long_chunks import MIN_ROWS, longest_copied
from metal_kernels.metal import MetalBackend
from metal_kernels.ops import Attention
from metal_kernels.tables import SequenceTables
from tests.emulated import emulated_factory
from tests.metal_kernels.oracle import Case, Paged


def recorded() -> tuple[MetalBackend, list[str]]:
    """The checked kernels, and the names of those that ran."""
    ran: list[str] = []
    make = emulated_factory(check=True)

    def recording(spec: KernelSpec, source: str) -> Any:
        kernel = make(spec, source)

        def call(**arguments: Any) -> Any:
            ran.append(spec.name)
            return kernel(**arguments)

        return call

    return MetalBackend(recording), ran


def test_copies_grow_with_the_rows_and_stay_within_32_kib_for_each() -> None:
    for dtype in (mx.float16, mx.bfloat16):
        assert longest_copied(512, 8, 128, dtype) == 4096
        assert longest_copied(256, 8, 128, dtype) == 2048
        assert longest_copied(512, 4, 64, dtype) == 16_384


@pytest.mark.parametrize(
    ("rows", "head_dim", "dtype"),
    [(MIN_ROWS - 1, 128, mx.float16), (512, 96, mx.float16), (512, 128, mx.float32)],
    ids=str,
)
def test_what_mlx_has_no_exact_fused_attention_for_is_not_copied(
    rows: int, head_dim: int, dtype: mx.Dtype
) -> None:
    assert longest_copied(rows, 8, head_dim, dtype) == 0


@pytest.mark.parametrize(
    ("before", "options", "kernel"),
    [
        (7936, {}, "gather_pages"),
        (7937, {}, "paged_prefill"),
        (7937, {"window": 4000}, "gather_pages"),
        (0, {"softcap": 2.0}, "paged_prefill"),
    ],
    ids=str,
)
def test_positions_that_a_chunk_sees_decide(
    before: int, options: dict[str, Any], kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """256 rows of 4 kv heads: 8,192 positions."""
    ran: list[str] = []

    def metal_kernel(*, name: str, **_: Any) -> Any:
        def call(**arguments: Any) -> list[mx.array]:
            ran.append(name)
            shapes = zip(arguments["output_shapes"], arguments["output_dtypes"], strict=True)
            return [mx.zeros(shape, dtype) for shape, dtype in shapes]

        return call

    monkeypatch.setattr(mx.fast, "metal_kernel", metal_kernel)
    backend = MetalBackend(on_metal)
    k_pool, v_pool = (backend.new_pool(1, 4, 64, 64, mx.float16) for _ in range(2))
    pages = np.zeros((1, -(-(before + 256) // 64)), np.int32)
    starts = np.array([0, 256], np.int32)
    tables = SequenceTables(pages, np.array([before + 256], np.int32), starts, 64)
    queries = mx.zeros((256, 4, 64), mx.float16)
    backend.paged_prefill(queries, k_pool, v_pool, tables, Attention(1.0, **options))
    assert ran == [kernel]


@pytest.mark.parametrize(
    "options",
    [{}, {"window": 70, "dtype": mx.bfloat16}, {"window": 300, "has_sinks": True}],
    ids=str,
)
def test_long_chunks_are_right_beside_short_ones(options: dict[str, Any]) -> None:
    backend, ran = recorded()
    sequences = ((3, 5), (40, 257), (0, 256), (20, 9))
    found = Paged(backend, Case(sequences, group=2, **{"dtype": mx.float16, **options}))
    assert found.error() <= found.tolerance
    assert ran[-4:] == ["paged_prefill", "gather_pages", "gather_pages", "paged_prefill"]


def test_a_chunk_alone_and_beside_others_is_bit_identical() -> None:
    backend, _ = recorded()
    found = Paged(backend, Case(((7, 256), (9, 4)), dtype=mx.float16))
    pools, tables = found.pools(), found.tables
    queries = mx.random.normal((260, 4, 64), key=mx.random.key(1)).astype(mx.float16)
    together = backend.paged_prefill(queries, *pools, tables, Attention(0.1))
    alone = SequenceTables(
        tables.page_tables[:1], tables.context_lens[:1], np.array([0, 256], np.int32), 16
    )
    answer = backend.paged_prefill(queries[:256], *pools, alone, Attention(0.1))
    assert mx.array_equal(together[:256], answer)

"""Long chunks go through copies of their pages to MLX's attention, others through the tile kernel."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import mlx.core as mx
import numpy as np
import pytest

from metal_kernels import long_chunks
from metal_kernels.kernels import KernelSpec, on_metal
from metal_kernels.limits import COPIED_DIMS, HEAD_DIMS, MIN_COPIED_ROWS, positions_in, room_for
from metal_kernels.long_chunks import longest_copied
from metal_kernels.metal import MetalBackend
from metal_kernels.ops import Attention
from metal_kernels.step_ways import StepWay
from metal_kernels.tables import SequenceTables
from tests.command_buffers import BufferCache
from tests.emulated import emulated_factory
from tests.geometries import GEOMETRIES, QWEN3_8B
from tests.mac_attention import HEAD_DIMS as ON_EVERY_CHIP
from tests.mac_attention import HEAD_DIMS_ON_M5 as ON_M5
from tests.mac_attention import MacAttention
from tests.memory_table import max_positions
from tests.metal_kernels.oracle import Case, Paged

Answer: TypeAlias = Callable[[frozenset[int]], MacAttention]


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


@pytest.fixture
def little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of which 8 MiB may be copies."""
    monkeypatch.setattr(long_chunks, "total_memory", lambda: 256 << 20)


def test_copies_take_a_share_of_the_machines_memory() -> None:
    for dtype in (mx.float16, mx.bfloat16):
        for rows in (256, 512):
            assert longest_copied(rows, 8, 128, dtype, 8 << 30) == 64 << 10
            assert longest_copied(rows, 8, 128, dtype, 16 << 30) == 128 << 10
            assert longest_copied(rows, 4, 64, dtype, 16 << 30) == 512 << 10


def test_no_chunk_below_128k_positions_leaves_mlxs_kernel_on_an_m5() -> None:
    """As far as the machine has room for them. The tile kernel takes 2.6 times as long at 32 Ki, by a model
    of both."""
    for memory in [16, 24, 32, 36, 48, 64, 128]:
        for model in GEOMETRIES:
            longest = longest_copied(512, model.kv_heads, model.head_dim, mx.bfloat16, memory << 30)
            assert longest >= min(128 << 10, max_positions(model, memory)), (memory, model)


def fresh_copies(room: Callable[[int], int], limit: int = 1 << 40) -> list[int]:
    """Sizes of the buffers that the device makes for copies of a prompt of 32 Ki tokens.

    The model has 8B parameters, the chunks 512 rows, and three layers are under way.
    """
    cache, under_way = BufferCache(limit), deque[int]()
    for seen in range(512, (32 << 10) + 1, 512):
        for _ in range(QWEN3_8B.num_layers):
            while len(under_way) > 4:
                cache.free(under_way.popleft())
            nbytes = 2 * QWEN3_8B.kv_heads * QWEN3_8B.head_dim * room(seen)
            under_way += [cache.allocate(nbytes) for _ in ("keys", "values")]
    return cache.fresh


def test_copies_of_a_long_prompt_use_the_memory_of_earlier_chunks_again() -> None:
    """With copies of exactly what it sees, every chunk would get new memory."""
    exact, rounded = fresh_copies(lambda seen: seen), fresh_copies(room_for)
    assert (len(exact), round(sum(exact) / 1e9, 1)) == (384, 13.1)
    assert (len(rounded), round(sum(rounded) / 1e9, 1)) == (48, 1.1)
    planned_step = int(1.4e9)
    assert fresh_copies(room_for, planned_step) == rounded


def test_the_room_of_copies_is_rounded_and_never_smaller() -> None:
    for seen in range(256, 70_000, 13):
        room = room_for(seen)
        assert seen <= room < max(2 * seen, seen + 8192)
        assert room_for(room) == room == positions_in(room)
        assert room_for(positions_in(seen)) <= seen
    assert [room_for(seen) for seen in (257, 8191, 8193, 16_385)] == [512, 8192, 16_384, 24_576]
    assert positions_in(0) == 0


def test_copies_with_their_room_take_at_most_their_share() -> None:
    for memory in (8, 18, 24, 36, 96):
        for kv_heads in (1, 3, 8, 10):
            seen = longest_copied(512, kv_heads, 80, mx.bfloat16, memory << 30)
            assert 2 * kv_heads * 80 * 2 * room_for(seen) <= (memory << 30) // 32


@pytest.fixture
def mac(monkeypatch: pytest.MonkeyPatch) -> Iterator[Answer]:
    """Makes this machine answer as a Mac whose MLX has fused kernels for these head dimensions."""

    def answer(head_dims: frozenset[int]) -> MacAttention:
        attention = MacAttention(head_dims)
        monkeypatch.setattr(mx.metal, "is_available", lambda: True)
        monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", attention)
        monkeypatch.setattr(long_chunks, "timed_choices", {})
        long_chunks.is_fused.cache_clear()
        return attention

    yield answer
    long_chunks.is_fused.cache_clear()


def ways(dtype: mx.Dtype = mx.bfloat16) -> dict[int, str]:
    """Of each head dimension that the kernels take: c for copies, t for tiles, of chunks of 63 to 2,048 rows."""
    rows = (63, 64, 255, 256, 512, 2048)
    return {
        head_dim: "".join(
            "c" if longest_copied(each, 8, head_dim, dtype, 16 << 30) else "t" for each in rows
        )
        for head_dim in HEAD_DIMS
    }


_BY_TILES, _BY_COPIES, _FROM_64_ROWS = "tttttt", "tttccc", "tccccc"
# MLX itself computes 192 and 256 unfused on chips before the M5, and has no fused kernel for 112 and 512 there.
WITHOUT_ACCELERATORS = {
    **dict.fromkeys((64, 80, 96, 128), _BY_COPIES),
    **dict.fromkeys((112, 192, 256, 512), _BY_TILES),
}
WITH_ACCELERATORS = {
    **dict.fromkeys((64, 80, 96, 128, 256, 512), _FROM_64_ROWS),
    **dict.fromkeys((112, 192), _BY_TILES),
}


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
def test_head_dimension_rows_and_accelerators_decide(dtype: mx.Dtype, mac: Answer) -> None:
    mac(ON_EVERY_CHIP)
    assert ways(dtype) == WITHOUT_ACCELERATORS
    mac(ON_M5)
    assert ways(dtype) == WITH_ACCELERATORS


def test_a_chunk_on_every_chip_is_copied_of_these_head_dimensions(mac: Answer) -> None:
    """These decide how a step is estimated where no Mac can be asked."""
    mac(ON_EVERY_CHIP)
    assert tuple(dim for dim, way in ways().items() if way == _BY_COPIES) == COPIED_DIMS


def test_float32_is_computed_by_tiles_on_every_chip(mac: Answer) -> None:
    for head_dims in (ON_EVERY_CHIP, ON_M5):
        mac(head_dims)
        assert set(ways(mx.float32).values()) == {_BY_TILES}


@pytest.mark.skipif(mx.metal.is_available(), reason="on a Mac MLX answers for its own chip")
def test_the_emulator_chooses_as_a_mac_without_accelerators(mac: Answer) -> None:
    here = ways()
    mac(ON_EVERY_CHIP)
    assert here == ways()


def test_a_kernel_that_mlx_does_not_have_is_not_chosen(mac: Answer) -> None:
    """Also where another one tells of neural accelerators."""
    mac(ON_M5 - {128, 256})
    assert ways() == WITH_ACCELERATORS | {128: _BY_TILES, 256: _BY_TILES}


def test_on_a_mac_mlx_is_asked_once_for_each_head_dimension(mac: Answer) -> None:
    attention = mac(ON_EVERY_CHIP)
    for _ in range(2):
        ways()
    expected = [(dim, "causal") for dim in HEAD_DIMS]
    expected += [(dim, "array") for dim in ON_EVERY_CHIP.intersection(HEAD_DIMS)]
    assert sorted(attention.forced) == sorted(expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("head_dim", "head_dims", "kernel"),
    [
        (128, ON_EVERY_CHIP, "gather_pages"),
        (256, ON_EVERY_CHIP, "paged_prefill"),
        (256, ON_M5, "gather_pages"),
        (192, ON_M5, "paged_prefill"),
    ],
    ids=["128", "256", "256 on an M5", "192 on an M5"],
)
def test_a_long_chunk_is_right_as_it_is_chosen(
    head_dim: int, head_dims: frozenset[int], kernel: str, mac: Answer
) -> None:
    mac(head_dims)
    backend, ran = recorded()
    dims = {"key_dim": head_dim, "value_dim": head_dim}
    found = Paged(backend, Case(((3, 256),), kv_heads=1, group=1, dtype=mx.float16, **dims))
    assert found.error() <= found.tolerance
    assert ran[-1] == kernel


def test_the_question_of_the_installed_mlx_has_the_arguments_that_it_knows() -> None:
    """On a CPU, which has no fused attention and says so."""
    rows = mx.zeros((1, 2, 8, 64), mx.float16)
    with pytest.raises(ValueError, match="no fused kernel is available"):
        mx.fast.scaled_dot_product_attention(
            rows, rows, rows, scale=1.0, mask="causal", sinks=None, force_fused=True, stream=mx.cpu
        )


@pytest.mark.parametrize(
    ("rows", "head_dim", "dtype"),
    [(MIN_COPIED_ROWS - 1, 128, mx.float16), (512, 112, mx.float16), (512, 128, mx.float32)],
    ids=str,
)
def test_what_mlx_has_no_exact_fused_attention_for_is_not_copied(
    rows: int, head_dim: int, dtype: mx.Dtype
) -> None:
    assert longest_copied(rows, 8, head_dim, dtype) == 0


@pytest.mark.usefixtures("little_memory")
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


def test_no_chunk_is_copied_where_the_self_test_of_copies_failed() -> None:
    backend, ran = recorded()
    backend.without = frozenset([StepWay.GATHERED])
    found = Paged(backend, Case(((3, 256),), kv_heads=1, group=1, dtype=mx.float16))
    assert found.error() <= found.tolerance
    assert ran[-1] == "paged_prefill"


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"window": 64},
        {"window": 65, "page_size": 32, "dtype": mx.bfloat16, "has_sinks": True},
        {"window": 129, "page_size": 64, "is_quantised": True},
    ],
    ids=str,
)
def test_a_long_chunk_sees_all_of_its_window_and_nothing_before_it(options: dict[str, Any]) -> None:
    """Its copies begin at the first position that any row sees, in the middle of a page."""
    backend, ran = recorded()
    case = Case(((333, 256), (500, 300)), group=2, **{"dtype": mx.float16, **options})
    found = Paged(backend, case)
    for (before, _), pages in zip(case.sequences, found.tables.page_tables, strict=True):
        first = before - options["window"] + 1
        assert first > 0
        assert first % case.page_size > 0
        assert pages.size * case.page_size > before
    assert found.error() <= found.tolerance
    assert ran[-2:] == ["gather_pages", "gather_pages"]


@pytest.mark.parametrize(
    ("before", "window"),
    [(255, None), (256, None), (257, None), (300, 256), (300, 257), (300, 258)],
    ids=str,
)
def test_copies_are_right_however_much_of_their_room_is_left(
    before: int, window: int | None
) -> None:
    """The rows see 511 to 513 positions. The rest of the room holds NaN."""
    backend, ran = recorded()
    paged = Paged(backend, Case(((before, 256),), window=window, dtype=mx.float16))
    assert paged.error() <= paged.tolerance
    assert ran[-1] == "gather_pages"


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

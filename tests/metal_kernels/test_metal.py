"""What the backend hands to Metal, recorded by a fake of mx.fast.metal_kernel."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from metal_kernels.first_page import first_page
from metal_kernels.kernels import ALL, on_metal
from metal_kernels.metal import MetalBackend
from metal_kernels.ops import Attention, Heads
from metal_kernels.reading import view
from metal_kernels.replay import Spans
from metal_kernels.tables import RecordedTables, SequenceTables
from mlxserve.cache.kv import KVPool, LayerSpec
from mlxserve.cache.layer_kv import LayerKV
from mlxserve.cache.layout import StepLayout
from tests.metal_kernels.mlx_products import quantised as quantised_weights
from tests.metal_kernels.test_replay import delta_case, ssm_case

PAGE_SIZE = 16
READERS = (
    "paged_decode",
    "grouped_decode",
    "draft_decode",
    "grouped_drafts",
    "paged_prefill",
    "paged_latent",
    "gather_pages",
)
WRITERS = ("write_kv_tokens", "write_kv_pages", "copy_pages")


@dataclass(frozen=True)
class Dispatch:
    """One call of a kernel: its buffers by name, and MLX's other arguments."""

    kernel: str
    inputs: dict[str, mx.array]
    outputs: dict[str, mx.array]
    template: dict[str, Any]
    grid: tuple[int, int, int]
    threadgroup: tuple[int, int, int]

    def waits_for(self) -> list[mx.array]:
        return [array for name, array in self.inputs.items() if name.startswith("after")]


class FakeMetal:
    """Records the kernels that mx.fast.metal_kernel builds and their calls; computes nothing."""

    def __init__(self) -> None:
        self.built: list[str] = []
        self.headers: dict[str, str] = {}  # of the kernels that were built
        self.calls: list[Dispatch] = []

    def metal_kernel(
        self,
        *,
        name: str,
        input_names: list[str],
        output_names: list[str],
        source: str,
        header: str,
    ) -> Any:
        assert source.strip()
        self.built.append(name)
        self.headers[name] = header

        def call(
            *,
            inputs: list[mx.array],
            template: list[tuple[str, Any]],
            grid: tuple[int, int, int],
            threadgroup: tuple[int, int, int],
            output_shapes: list[tuple[int, ...]],
            output_dtypes: list[mx.Dtype],
        ) -> list[mx.array]:
            outputs = [mx.zeros(s, d) for s, d in zip(output_shapes, output_dtypes, strict=True)]
            self.calls.append(
                Dispatch(
                    name,
                    dict(zip(input_names, inputs, strict=True)),
                    dict(zip(output_names, outputs, strict=True)),
                    dict(template),
                    grid,
                    threadgroup,
                )
            )
            return outputs

        return call

    def take(self) -> list[Dispatch]:
        calls, self.calls = self.calls, []
        return calls


@pytest.fixture
def metal(monkeypatch: pytest.MonkeyPatch) -> FakeMetal:
    fake = FakeMetal()
    monkeypatch.setattr(mx.fast, "metal_kernel", fake.metal_kernel)
    return fake


@pytest.fixture
def backend(metal: FakeMetal) -> MetalBackend:
    return MetalBackend(on_metal)


@pytest.fixture
def kv(backend: MetalBackend) -> KVPool:
    """Two layers, as the engine has them; the second has a window."""
    spec = LayerSpec(kv_heads=2, key_dim=64, value_dim=64, dtype=mx.float16)
    windowed = LayerSpec(kv_heads=2, key_dim=64, value_dim=64, dtype=mx.float16, window=8)
    return KVPool([spec, windowed], num_pages=8, page_size=PAGE_SIZE, backends=backend)


def tables(contexts: list[int], rows: list[int]) -> SequenceTables:
    pages = np.arange(8, dtype=np.int32).reshape(-1, 2)[: len(contexts)]
    return SequenceTables(
        page_tables=pages,
        context_lens=np.array(contexts, np.int32),
        query_starts=np.cumsum([0, *rows], dtype=np.int32),
        page_size=PAGE_SIZE,
    )


def draft() -> SequenceTables:
    """Two rows of one sequence."""
    pages, lens = np.zeros((2, 1), np.int32), np.array([1, 2], np.int32)
    return SequenceTables(pages, lens, np.arange(3, dtype=np.int32), PAGE_SIZE)


def long_chunk() -> SequenceTables:
    """256 rows, which MLX's attention takes."""
    pages, lens = np.arange(16, dtype=np.int32)[None], np.array([256], np.int32)
    return SequenceTables(pages, lens, np.array([0, 256], np.int32), PAGE_SIZE)


def mixed_step() -> StepLayout:
    """Two decodes and a chunk of 24 rows: one whole page, and the next one's first 8 slots."""
    return StepLayout(
        positions=mx.arange(26),
        slots=np.array([3, 35, *range(64, 88)], np.int32),
        num_decodes=2,
        decodes=tables([4, 4], [1, 1]),
        chunks=tables([24], [24]),
    )


def run_step(kv: KVPool, step: StepLayout) -> None:
    rows = len(step.slots)
    for layer in [LayerKV(kv, index, step) for index in range(len(kv.specs))]:
        layer.update_and_fetch(*(mx.zeros((rows, 2, 1, 64), mx.float16) for _ in range(2)))
        layer.attend(mx.zeros((rows, 4, 1, 64), mx.float16), scale=0.125)


def is_among(array: mx.array, arrays: list[mx.array]) -> bool:
    return any(array is other for other in arrays)


def test_a_mixed_step_is_two_dispatches_over_its_own_rows(kv: KVPool, metal: FakeMetal) -> None:
    run_step(kv, mixed_step())
    layer = ["write_kv_pages", "write_kv_tokens", "paged_decode", "merge_partitions"]
    assert [call.kernel for call in metal.calls] == [*layer, "paged_prefill"] * 2
    assert [call.inputs["queries"].shape[0] for call in metal.calls if call.kernel in READERS] == [
        *(2, 24),
        *(2, 24),
    ]


def test_rows_of_decodes_reach_the_kernels_as_the_model_passes_them(
    kv: KVPool, metal: FakeMetal
) -> None:
    """No node of the graph is made for their shapes."""
    step = StepLayout(mx.arange(2), np.array([3, 35], np.int32), 2, tables([4, 4], [1, 1]), None)
    keys, values, queries = (mx.zeros((2, heads, 1, 64), mx.float16) for heads in (2, 2, 4))
    layer = LayerKV(kv, 0, step)
    layer.update_and_fetch(keys, values)
    output = layer.attend(queries, scale=0.125)
    write, decode, merge = metal.calls
    assert write.inputs["keys"] is keys
    assert write.inputs["values"] is values
    assert decode.inputs["queries"] is queries
    assert output is merge.outputs["out"]
    assert output.shape == queries.shape


def test_a_kernel_is_built_with_its_header(kv: KVPool, metal: FakeMetal) -> None:
    run_step(kv, mixed_step())
    headers = {spec.name: spec.header for spec in ALL}
    assert metal.headers == {name: headers[name] for name in metal.headers}
    assert {bool(header) for header in metal.headers.values()} == {True, False}


def test_each_reader_binds_the_fence_of_the_write_before_it(kv: KVPool, metal: FakeMetal) -> None:
    for _ in range(3):
        run_step(kv, mixed_step())
    last_write: dict[int, mx.array] = {}
    num_reads = 0
    for call in metal.calls:
        pool = id(call.inputs.get("k_pool"))
        if call.kernel in WRITERS:
            last_write[pool] = call.outputs["fence"]
        elif call.kernel in READERS:
            assert is_among(last_write[pool], call.waits_for())
            num_reads += 1
    assert num_reads == 12
    assert len(last_write) == 2


def test_attention_over_latents_is_ordered_like_any_other_read(
    backend: MetalBackend, metal: FakeMetal
) -> None:
    pools = [backend.new_pool(8, 1, PAGE_SIZE, dim, mx.float16) for dim in (512, 64)]
    step, rows = mixed_step(), 26
    assert step.decodes is not None
    assert step.chunks is not None
    for _ in range(2):
        new = [mx.zeros((rows, 1, dim), mx.float16) for dim in (512, 64)]
        backend.write_kv(*new, *pools, step.slots)
        queries = [mx.zeros((rows, 20, dim), mx.float16) for dim in (512, 64)]
        for some, part in ((step.decodes, slice(2)), (step.chunks, slice(2, rows))):
            backend.paged_latent(*(q[part] for q in queries), *pools, some, scale=0.1)
    calls = [call for call in metal.calls if call.kernel != "merge_partitions"]
    one_step = ["write_kv_pages", "write_kv_tokens", "paged_latent", "paged_latent"]
    assert [call.kernel for call in calls] == 2 * one_step
    for write, reads in ((calls[1], calls[2:4]), (calls[5], calls[6:])):
        assert all(is_among(write.outputs["fence"], read.waits_for()) for read in reads)
    assert all(is_among(read.outputs["fence"], calls[4].waits_for()) for read in calls[2:4])


def test_decodes_over_latents_are_planned_without_the_numbers_of_a_recorded_step(
    backend: MetalBackend, metal: FakeMetal
) -> None:
    """They would be constants of the step's graph."""
    k_pool, v_pool = (backend.new_pool(8, 1, PAGE_SIZE, dim, mx.float16) for dim in (512, 64))
    q_latent, q_rope = (mx.zeros((2, 40, dim), mx.float16) for dim in (512, 64))
    built = tables([20, 4], [1, 1])
    backend.paged_latent(q_latent, q_rope, k_pool, v_pool, built, scale=0.1)
    uploads = {key: arrays for key, (_, arrays) in built.uploads.items()}
    recorded = RecordedTables(2, PAGE_SIZE, uploads)
    backend.paged_latent(q_latent, q_rope, k_pool, v_pool, recorded, scale=0.1)
    first, _, second, _ = metal.calls
    assert second.grid == first.grid
    for name in ("tiles", "page_tables"):
        assert second.inputs[name] is first.inputs[name]


def test_a_second_write_of_a_step_binds_the_fence_of_the_first(
    kv: KVPool, metal: FakeMetal
) -> None:
    run_step(kv, mixed_step())
    pages, tokens = metal.calls[:2]
    assert is_among(pages.outputs["fence"], tokens.waits_for())


def test_the_next_steps_first_writer_binds_the_last_steps_fences(
    kv: KVPool, metal: FakeMetal
) -> None:
    """Of every read, so that a freed page is not written while a running step reads it."""
    run_step(kv, mixed_step())
    reads: dict[int, list[mx.array]] = {}
    for call in metal.take():
        if call.kernel in READERS:
            reads.setdefault(id(call.inputs["k_pool"]), []).append(call.outputs["fence"])
    run_step(kv, mixed_step())
    first_writes = [call for call in metal.calls if call.kernel == "write_kv_pages"]
    assert len(first_writes) == 2
    for call in first_writes:
        fences = reads[id(call.inputs["k_pool"])]
        assert len(fences) == 2
        assert all(is_among(fence, call.waits_for()) for fence in fences)


def test_a_copy_of_pages_is_ordered_like_a_write(
    kv: KVPool, backend: MetalBackend, metal: FakeMetal
) -> None:
    run_step(kv, mixed_step())
    keys, values = kv.arrays()[0], kv.arrays()[2]
    fences = [
        call.outputs["fence"]
        for call in metal.take()
        if call.kernel in READERS and call.inputs["k_pool"] is first_page(keys)
    ]
    backend.copy_pages(keys, values, np.array([1], np.int32), np.array([2], np.int32), PAGE_SIZE)
    run_step(kv, mixed_step())
    copy, write = metal.calls[:2]
    assert copy.kernel == "copy_pages"
    assert all(is_among(fence, copy.waits_for()) for fence in fences)
    assert is_among(copy.outputs["fence"], write.waits_for())


def test_readers_beyond_what_a_writer_can_wait_for_queue_behind_one_another(
    kv: KVPool, metal: FakeMetal
) -> None:
    """Every read precedes the next write, directly or through a later read."""
    step = mixed_step()
    run_step(kv, step)
    layer = LayerKV(kv, 0, step)
    for _ in range(5):
        layer.attend(mx.zeros((26, 4, 1, 64), mx.float16), scale=0.125)
    run_step(kv, step)
    calls = [c for c in metal.calls if c.inputs.get("k_pool") is metal.calls[0].inputs["k_pool"]]
    before: dict[int, set[int]] = {}  # of each dispatch, which it comes after
    made_by: dict[int, int] = {}
    for number, call in enumerate(calls):
        found = {made_by[id(wait)] for wait in call.waits_for() if id(wait) in made_by}
        before[number] = found.union(*(before[n] for n in found))
        made_by[id(call.outputs["fence"])] = number
    readers = [n for n, call in enumerate(calls) if call.kernel in READERS]
    last_writer = max(n for n, call in enumerate(calls) if call.kernel == "write_kv_pages")
    assert {n for n in readers if n < last_writer} <= before[last_writer]
    assert len(readers) == 14


def test_a_long_chunk_reads_copies_that_are_ordered_like_any_other_read(
    backend: MetalBackend, metal: FakeMetal
) -> None:
    """A page that is freed after the step is not written before it was copied."""
    pools = [backend.new_pool(16, 2, PAGE_SIZE, 64, mx.float16) for _ in range(2)]
    rows, queries = mx.zeros((256, 2, 64), mx.float16), mx.zeros((256, 4, 64), mx.float16)
    for _ in range(2):
        backend.write_kv(rows, rows, *pools, np.arange(256, dtype=np.int32))
        backend.paged_prefill(queries, *pools, long_chunk(), Attention(1.0))
    write, gather, second, _ = metal.calls
    assert [write.kernel, gather.kernel] == ["write_kv_pages", "gather_pages"]
    assert is_among(write.outputs["fence"], gather.waits_for())
    assert is_among(gather.outputs["fence"], second.waits_for())


def address(array: mx.array) -> int:
    return int(view(array.view(mx.uint8)).ctypes.data)


def bound_pools(metal: FakeMetal) -> dict[str, list[mx.array]]:
    """What each kernel was given as a pool."""
    found: dict[str, list[mx.array]] = {}
    for call in metal.calls:
        pools = [call.inputs[name] for name in ("k_pool", "v_pool") if name in call.inputs]
        found[call.kernel] = found.get(call.kernel, []) + pools
    return found


def test_pools_are_bound_from_their_first_byte_and_never_replaced(
    kv: KVPool, metal: FakeMetal
) -> None:
    first = kv.arrays()
    for _ in range(3):
        run_step(kv, mixed_step())
    bound = list(chain.from_iterable(bound_pools(metal).values()))
    assert {id(pool) for pool in bound} == {id(first_page(pool)) for pool in first}
    assert {address(pool) for pool in bound} == {address(pool) for pool in first}
    assert all(now is then for now, then in zip(kv.arrays(), first, strict=True))


def test_no_kernel_binds_more_than_a_page_of_a_pool(
    backend: MetalBackend, metal: FakeMetal
) -> None:
    """MLX counts what is bound, and ends a command buffer beyond a limit."""
    dispatch_every_kernel(backend, num_pages=32)
    bound = bound_pools(metal)
    assert {spec.name for spec in ALL if "k_pool" in spec.inputs} == {
        kernel for kernel, pools in bound.items() if pools
    }
    for kernel, pools in bound.items():
        assert {pool.shape[0] for pool in pools} <= {1}, kernel
        assert all(view(pool).flags.c_contiguous for pool in pools), "mlx would bind a copy"


def test_a_grown_pool_is_bound_where_it_is_now_and_the_old_one_is_freed(
    kv: KVPool, metal: FakeMetal
) -> None:
    run_step(kv, mixed_step())
    metal.take()
    gc.collect()
    before = mx.get_active_memory()
    old, size = kv.nbytes, kv.nbytes_of(64)
    kv.resize(64)
    run_step(kv, mixed_step())
    bound = list(chain.from_iterable(bound_pools(metal).values()))
    assert {address(pool) for pool in bound} == {address(pool) for pool in kv.arrays()}
    metal.take()
    bound.clear()
    gc.collect()
    assert mx.get_active_memory() - before < size - old // 2


def test_no_input_is_small_enough_to_change_its_address_space(
    backend: MetalBackend, metal: FakeMetal
) -> None:
    """One sequence of one token, one page and one head: the smallest inputs."""
    dispatch_every_kernel(backend, num_pages=2)
    assert {call.kernel for call in metal.calls} == {spec.name for spec in ALL}
    for call in metal.calls:
        assert {name: a.size for name, a in call.inputs.items() if a.size < 8} == {}


def dispatch_every_kernel(backend: MetalBackend, num_pages: int) -> None:
    """Over pools of `num_pages`; of the one that a long chunk reads, 16 more."""
    pools = [backend.new_pool(num_pages, 1, PAGE_SIZE, 64, mx.float16) for _ in range(2)]
    row = mx.zeros((1, 1, 64), mx.float16)
    one = tables([1], [1])
    backend.write_kv(row, row, *pools, np.array([0], np.int32))
    page = mx.zeros((16, 1, 64), mx.float16)
    backend.write_kv(page, page, *pools, np.arange(16, dtype=np.int32))
    rotate(backend, pools, 1, 1)
    backend.copy_pages(*pools, np.array([0], np.int32), np.array([1], np.int32), PAGE_SIZE)
    for sinks in (None, mx.zeros(1, mx.float16)):
        backend.paged_decode(row, *pools, one, Attention(1.0), sinks)
        backend.paged_prefill(row, *pools, one, Attention(1.0), sinks)
        backend.attend_tiles(row, *pools, one, Attention(1.0), sinks, is_cooperative=True)
    backend.paged_decode(mx.zeros((1, 8, 64), mx.float16), *pools, one, Attention(1.0))
    for heads in (1, 8):
        rows = mx.zeros((2, heads, 64), mx.float16)
        backend.paged_decode(rows, *pools, draft(), Attention(1.0))
    half = [backend.new_pool(16 + num_pages, 1, PAGE_SIZE, 64, mx.float16) for _ in range(2)]
    backend.paged_prefill(mx.zeros((256, 1, 64), mx.float16), *half, long_chunk(), Attention(1.0))
    weights = quantised_weights(8, 256, 4, 32, mx.float16)
    backend.few_rows.product(mx.zeros((2, 256), mx.float16), weights, 1)
    replay(backend)
    in_8_bits = [backend.new_pool(num_pages, 1, PAGE_SIZE, 64, mx.int8) for _ in range(2)]
    backend.write_kv(row, row, *in_8_bits, np.array([0], np.int32))
    backend.paged_decode(row, *in_8_bits, one, Attention(1.0))
    latents = [backend.new_pool(num_pages, 1, PAGE_SIZE, dim, mx.float16) for dim in (256, 64)]
    backend.paged_latent(
        *(mx.zeros((1, 1, dim), mx.float16) for dim in (256, 64)), *latents, one, scale=1.0
    )


def replay(backend: MetalBackend) -> list[mx.array]:
    """The outputs of two rows of a draft, by each kind of recurrent layer."""
    return [
        backend.replay.outputs(rows, readout, states, Spans([(0, 0, 2)]))
        for rows, readout, states in (
            delta_case(mx.float16, num_rows=2),
            ssm_case(mx.float16, num_rows=2),
        )
    ]


def rotate(backend: MetalBackend, pools: list[mx.array], rows: int, kv_heads: int) -> mx.array:
    """The queries of rows of one head for each kv head, which go to the first slots."""
    heads = Heads(kv_heads, kv_heads, 64, 64)
    projected = (mx.zeros((rows, 1, sum(heads.widths)), mx.float16),)
    turns, slots = mx.zeros((rows, 1, 1, 64)), np.arange(rows, dtype=np.int32)
    queries, _ = backend.rotate_and_write(
        projected, turns, heads, None, (pools[0], pools[1]), slots
    )
    return queries


def test_every_kernel_is_built_once(kv: KVPool, metal: FakeMetal) -> None:
    for _ in range(3):
        run_step(kv, mixed_step())
    assert sorted(metal.built) == sorted(set(metal.built))
    assert len(metal.built) == 5


def test_tables_and_slots_are_uploaded_once_for_all_layers(kv: KVPool, metal: FakeMetal) -> None:
    run_step(kv, mixed_step())
    for name, kernels, count in (
        ("page_tables", READERS, 2),  # of decodes and of chunks
        ("moves", WRITERS, 2),  # whole pages and rows
        ("starts", ("merge_partitions",), 2),  # with the window and without
    ):
        bound = [call.inputs[name] for call in metal.calls if call.kernel in kernels]
        assert len({id(array) for array in bound}) == count, name


def test_threadgroups_stay_within_metals_limit(metal: FakeMetal) -> None:
    backend = MetalBackend(on_metal)
    for head_dim in (64, 80, 192, 256):
        for group in (1, 7, 16, 40):
            shape = (2, 2, 64, head_dim, mx.float32)
            pools = backend.new_pool(*shape), backend.new_pool(*shape)
            queries = mx.zeros((1, 2 * group, head_dim))
            for op in (backend.paged_decode, backend.paged_prefill):
                op(queries, *pools, tables([1], [1]), Attention(1.0))
            rows = mx.zeros((64, 2, head_dim))
            backend.write_kv(rows, rows, *pools, np.arange(64, dtype=np.int32))
            backend.write_kv(rows[:5], rows[:5], *pools, np.arange(5, dtype=np.int32))
    for call in metal.calls:
        assert np.prod(call.threadgroup) <= 1024
        assert all(t <= g for t, g in zip(call.threadgroup, call.grid, strict=True))


def settled(backend: MetalBackend) -> list[mx.array]:
    """The arrays that `settle` computes."""
    computed: list[mx.array] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mx, "eval", lambda *arrays: computed.extend(arrays))
        backend.settle()
    return computed


def test_settling_computes_a_write_that_nothing_reads(
    backend: MetalBackend, metal: FakeMetal
) -> None:
    pools = [backend.new_pool(2, 1, PAGE_SIZE, 64, mx.float16) for _ in range(2)]
    row = mx.zeros((1, 1, 64), mx.float16)
    backend.write_kv(row, row, *pools, np.array([0], np.int32))
    assert is_among(metal.calls[-1].outputs["fence"], settled(backend))


def test_pages_that_are_written_from_outside_a_step_are_waited_for(
    kv: KVPool, metal: FakeMetal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failure of the device belongs to these pages, not to the next answer."""
    computed: list[mx.array] = []
    monkeypatch.setattr(mx, "eval", lambda *arrays: computed.extend(arrays))
    kv.write_units([1, 3], [bytes(kv.nbytes_of(1))] * 2)
    writes = [call for call in metal.calls if call.kernel == "write_kv_pages"]
    assert len(writes) == 2
    assert all(is_among(call.outputs["fence"], computed) for call in writes)


def test_the_fences_of_a_pool_are_forgotten_with_it(backend: MetalBackend) -> None:
    pools = [backend.new_pool(2, 1, PAGE_SIZE, 64, mx.float16) for _ in range(6)]
    assert len(settled(backend)) == 6
    del pools[:4]
    gc.collect()
    assert len(settled(backend)) == 2


def test_a_pool_that_new_pool_did_not_return_is_refused(backend: MetalBackend) -> None:
    """Writes to a slice or a copy would be lost."""
    pools = [backend.new_pool(4, 1, PAGE_SIZE, 64, mx.float16) for _ in range(2)]
    row = mx.zeros((1, 1, 64), mx.float16)
    slots = np.array([0], np.int32)
    with pytest.raises(ValueError, match="passed whole"):
        backend.write_kv(row, row, pools[0][1:], pools[1][1:], slots)
    with pytest.raises(ValueError, match="passed whole"):
        backend.paged_decode(row, pools[0] + 0, pools[1] + 0, tables([1], [1]), Attention(1.0))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((4, 1, 16, 72, mx.float16), "head dimensions .*got 72; attention_backend=.cpu."),
        ((4, 1, 48, 64, mx.float16), r"pages have \(16, 32, 64\) slots, got 48"),
        ((4, 1, 16, 64, mx.int32), "float16, bfloat16 and float32, got"),
    ],
)
def test_pools_that_the_kernels_do_not_support_are_refused(
    arguments: Any, message: str, backend: MetalBackend
) -> None:
    with pytest.raises(ValueError, match=message):
        backend.new_pool(*arguments)


def test_keys_and_values_of_different_dimensions_are_refused(backend: MetalBackend) -> None:
    pools = (
        backend.new_pool(4, 1, 16, 192, mx.float16),
        backend.new_pool(4, 1, 16, 128, mx.float16),
    )
    rows = mx.zeros((1, 1, 192), mx.float16), mx.zeros((1, 1, 128), mx.float16)
    with pytest.raises(ValueError, match="one head dimension, got 192 and 128"):
        backend.write_kv(*rows, *pools, np.array([0], np.int32))
    with pytest.raises(ValueError, match="one head dimension, got 192 and 128"):
        backend.paged_prefill(rows[0], *pools, tables([1], [1]), Attention(1.0))


def test_a_resized_pool_replaces_the_old_one(backend: MetalBackend, metal: FakeMetal) -> None:
    old = backend.new_pool(4, 1, 16, 64, mx.float16)
    new = backend.resize_pool(old, 6, 16)
    rows = mx.zeros((1, 1, 64), mx.float16)
    backend.write_kv(rows, rows, new, new, np.array([95], np.int32))
    del old
    gc.collect()
    (fence,) = settled(backend)
    assert fence is metal.calls[-1].outputs["fence"]


@pytest.mark.parametrize("way", ["resized", "read"])
def test_a_pool_is_read_by_mlx_after_all_writes_to_it(
    way: str, backend: MetalBackend, metal: FakeMetal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLX sees no write in place, and would copy the pool beside the kernel that writes it."""
    pools = [backend.new_pool(4, 1, PAGE_SIZE, 64, mx.float16) for _ in range(2)]
    row, slots = mx.zeros((1, 1, 64), mx.float16), np.array([3], np.int32)
    backend.write_kv(row, row, *pools, slots)
    evaluated: list[tuple[mx.array, ...]] = []
    monkeypatch.setattr(mx, "eval", lambda *arrays: evaluated.append(arrays))
    if way == "resized":
        backend.resize_pool(pools[0], 6, PAGE_SIZE)
    else:
        backend.read_kv(*pools, slots)
    assert is_among(metal.calls[-1].outputs["fence"], list(evaluated[0]))


def test_a_copy_with_another_page_size_is_refused(backend: MetalBackend) -> None:
    pools = [backend.new_pool(4, 1, 16, 64, mx.float16) for _ in range(2)]
    with pytest.raises(ValueError, match="have 16 slots, not 32"):
        backend.copy_pages(*pools, np.array([0], np.int32), np.array([1], np.int32), 32)


def test_a_decode_with_several_rows_of_a_sequence_is_refused(backend: MetalBackend) -> None:
    pools = [backend.new_pool(4, 1, 16, 64, mx.float16) for _ in range(2)]
    queries = mx.zeros((2, 1, 64), mx.float16)
    with pytest.raises(ValueError, match="one row per sequence"):
        backend.paged_decode(queries, *pools, tables([2], [2]), Attention(1.0))


def test_mlx_itself_accepts_every_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MLX accepts the call of a kernel without Metal while it traces a function."""
    accepted: set[str] = set()
    real = mx.fast.metal_kernel

    def metal_kernel(**arguments: Any) -> Any:
        kernel = real(**arguments)

        def call(**arguments_of_call: Any) -> Any:
            outputs = kernel(**arguments_of_call)
            accepted.add(arguments["name"])
            return outputs

        return call

    monkeypatch.setattr(mx.fast, "metal_kernel", metal_kernel)
    backend = MetalBackend(on_metal)
    pools = [backend.new_pool(16, 2, 16, 64, mx.float16) for _ in range(2)]
    slots = np.array([0, *range(16, 32)], np.int32)

    latents = [backend.new_pool(4, 1, 16, dim, mx.float16) for dim in (256, 64)]
    in_8_bits = [backend.new_pool(4, 2, 16, 64, mx.int8) for _ in range(2)]
    weights = quantised_weights(8, 256, 4, 32, mx.float16)

    def step(rows: mx.array, queries: mx.array) -> list[mx.array]:
        asked = mx.tile(queries, 4), queries
        over_latents = [
            backend.paged_latent(
                *(mx.repeat(q, n, axis=0) for q in asked), *latents, some, scale=1.0
            )
            for n, some in ((1, tables([4], [1])), (3, tables([4], [3])))
        ]
        backend.write_kv(rows, rows, *pools, slots)
        backend.write_kv(rows, rows, *in_8_bits, slots)
        rotated = [rotate(backend, both, 3, 2) for both in (pools, in_8_bits)]
        backend.copy_pages(*pools, np.array([0], np.int32), np.array([2], np.int32), 16)
        capped, sinks = Attention(1.0, softcap=3.0), mx.zeros(4, mx.float16)
        long = mx.zeros((256, 4, 64), mx.float16)
        gathered = backend.paged_prefill(long, *pools, long_chunk(), Attention(1.0))
        large = mx.tile(queries, (1, 4, 1))
        grouped = backend.paged_decode(large, *pools, tables([4], [1]), Attention(1.0))
        few = backend.few_rows.product(mx.zeros((2, 256), mx.float16), weights, 1)
        drafted = [
            backend.paged_decode(mx.tile(each, (2, 1, 1)), *pools, draft(), Attention(1.0))
            for each in (queries, large)
        ]
        drafted += replay(backend)
        drafted.append(
            backend.attend_tiles(
                queries, *pools, tables([4], [1]), capped, sinks, is_cooperative=True
            )
        )
        return [*over_latents, *rotated, gathered, grouped, few, *drafted] + [
            op(queries, *both, tables([4], [1]), capped, sinks)
            for op in (backend.paged_decode, backend.paged_prefill)
            for both in (pools, in_8_bits)
        ]

    arrays = mx.zeros((17, 2, 64), mx.float16), mx.zeros((1, 4, 64), mx.float16)
    mx.export_function(str(tmp_path / "step.mlxfn"), step, *arrays)
    assert accepted == {spec.name for spec in ALL}

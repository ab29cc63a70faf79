"""The pool gets the memory that weights and a step leave."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from metal_kernels import long_chunks
from metal_kernels.choice import select_backend
from metal_kernels.kernels import (
    ALL,
    GROUPED_DECODE,
    PAGED_LATENT,
    QUANTISE_KV,
    ROTATE_AND_WRITE,
    WRITE_KV_TOKENS,
    Kernel,
    KernelSpec,
)
from metal_kernels.metal import MetalBackend
from metal_kernels.x86.backend import X86Backend
from mlxserve.cache.kv import LayerSpec
from mlxserve.config import EngineConfig
from mlxserve.errors import InvalidConfig, OutOfMemory
from mlxserve.hub.context import Context
from mlxserve.model import step_graphs
from mlxserve.model.fused_layers import FusedLayers
from mlxserve.model.load import LoadedModel, prepare
from mlxserve.model.probe import probe
from mlxserve.model.sizing import (
    StepPeak,
    copied_positions,
    default_step_budget,
    first_pages,
    fit_pages,
    measure_step,
    measured_rows,
    peak_with_copies,
    with_sizes,
)
from tests.emulated import emulated_backend, emulated_factory

MIB = 1 << 20
PAGE_BYTES = 16 * 3 * 2 * (64 + 64) * 4  # slots * layers * kv heads * (key + value) * float32


@pytest.fixture(scope="module")
def loaded(build_model: Callable[..., tuple[nn.Module, dict[str, Any]]]) -> LoadedModel:
    return prepare(*build_model("llama"), "tiny")


def measured(loaded: LoadedModel, rows: int, *, is_metal: bool = False) -> StepPeak:
    config = EngineConfig().with_options(
        page_size=16, max_num_batched_tokens=rows, max_num_seqs=min(rows, 64)
    )
    backend = select_backend("cpu")
    return measure_step(config, loaded, backend, is_metal=is_metal, memory_limit=1 << 34)


def pages(
    loaded: LoadedModel, memory_limit: int, *, rows: int = 64, max_tokens: int = 10**9
) -> int:
    step = measured(loaded, rows)
    return fit_pages(loaded, step, page_size=16, memory_limit=memory_limit, max_tokens=max_tokens)


def test_additional_memory_becomes_additional_pages(loaded: LoadedModel) -> None:
    few = pages(loaded, loaded.weight_size + 64 * MIB)
    many = pages(loaded, loaded.weight_size + 64 * MIB + 100 * PAGE_BYTES)
    assert many - few == pytest.approx(100, abs=few * 0.05)


def test_in_8_bits_the_same_memory_has_more_pages(loaded: LoadedModel) -> None:
    """Here 3.8 times as many: 68 bytes instead of 256 for each row of 64 numbers in float32."""
    limit = loaded.weight_size + 64 * MIB
    step = StepPeak(planned=0, measured=0, num_rows=64, num_measured=64, seconds=1)
    few, many = (
        fit_pages(model, step, page_size=16, memory_limit=limit, max_tokens=10**9)
        for model in (loaded, loaded.in_8_bits())
    )
    assert many / few == pytest.approx(256 / 68, rel=2e-3)


def test_weights_a_step_and_the_pool_fit_in_the_limit(loaded: LoadedModel) -> None:
    limit = loaded.weight_size + 64 * MIB
    found = pages(loaded, limit)
    assert found * PAGE_BYTES + loaded.weight_size <= limit
    assert found * PAGE_BYTES > 32 * MIB, "a step of this model needs far less than half"


def test_a_tower_and_its_step_take_memory_from_the_pages(loaded: LoadedModel) -> None:
    vision: Any = SimpleNamespace(nbytes=8 * MIB, planned_nbytes=4 * MIB, is_told_positions=False)
    seeing, limit = loaded.that_sees(vision), loaded.weight_size + 64 * MIB
    step = measured(seeing, 64)
    without = replace(step, planned=step.measured * step.num_rows // step.num_measured)
    assert step.planned == without.planned + 4 * MIB
    few, many = (
        fit_pages(model, peak, page_size=16, memory_limit=limit, max_tokens=10**9)
        for model, peak in ((seeing, step), (loaded, without))
    )
    assert (many - few) * PAGE_BYTES == pytest.approx(12 * MIB, abs=2 * PAGE_BYTES)


def test_a_larger_step_leaves_fewer_pages(loaded: LoadedModel) -> None:
    limit = loaded.weight_size + 256 * MIB
    assert pages(loaded, limit, rows=4096) < pages(loaded, limit)


def test_the_pool_is_capped_at_what_all_contexts_need(loaded: LoadedModel) -> None:
    limit = loaded.weight_size + 64 * MIB
    assert pages(loaded, limit, max_tokens=160) == 10
    assert pages(loaded, limit, max_tokens=161) == 11


def test_the_shortest_context_gets_two_pages(loaded: LoadedModel) -> None:
    assert pages(loaded, loaded.weight_size + 64 * MIB, max_tokens=3) == 2


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_too_little_memory_for_a_cache_is_refused_with_advice(
    share: float, loaded: LoadedModel
) -> None:
    with pytest.raises(OutOfMemory) as caught:
        pages(loaded, int(loaded.weight_size * share))
    assert str(caught.value).startswith("tiny: the weights and a step of 64 tokens leave no")
    assert "Raise gpu_memory_utilization" in str(caught.value)


def test_a_context_may_be_as_long_as_the_rotary_scaling_covers(loaded: LoadedModel) -> None:
    scaled = replace(loaded, context=Context(512, 2048))
    for asked, settled in ((None, 512), (600, 600), (2048, 2048)):
        config = EngineConfig().with_options(num_pages=100, page_size=32, max_model_len=asked)
        assert with_sizes(config, scaled, None, 1 << 30).scheduler.max_model_len == settled
    config = EngineConfig().with_options(num_pages=100, page_size=32, max_model_len=2049)
    with pytest.raises(InvalidConfig, match="tiny was made for 2048 tokens; lower it"):
        with_sizes(config, scaled, None, 1 << 30)


def test_a_context_for_which_there_is_no_memory_is_known_from_one_for_which_no_pages_were_asked(
    loaded: LoadedModel,
) -> None:
    words = "max_model_len=512 needs 16 pages of 32 tokens, and the cache has {}. .* raise {}"
    config = EngineConfig().with_options(page_size=32, max_model_len=512, max_num_batched_tokens=64)
    config = config.with_options(max_num_seqs=2)
    step = measured(loaded, 64)
    page = 32 * sum(spec.bytes_per_token() for spec in loaded.layers)
    limit = loaded.weight_size + step.planned + 15 * page
    with pytest.raises(OutOfMemory, match=words.format(15, "gpu_memory_utilization")):
        with_sizes(config, loaded, step, limit)
    assert with_sizes(config, loaded, step, limit + page).num_pages == 16
    with pytest.raises(InvalidConfig, match=words.format(15, "num_pages")):
        with_sizes(config.with_options(num_pages=15), loaded, step, limit + page)


def test_measuring_frees_its_memory(loaded: LoadedModel) -> None:
    pages(loaded, loaded.weight_size + 64 * MIB)
    before = mx.get_active_memory()
    pages(loaded, loaded.weight_size + 64 * MIB)
    assert mx.get_active_memory() <= before


def test_more_pages_than_the_device_holds_are_refused_before_they_are_allocated(
    loaded: LoadedModel,
) -> None:
    """2,147,483,647 pages filled the machine's memory until the system killed the process."""
    config = EngineConfig(num_pages=2**24)
    options = {"device_memory": loaded.weight_size + 10 * MIB}
    with pytest.raises(OutOfMemory, match=r"^num_pages=16777216 needs .* GiB") as caught:
        with_sizes(config, loaded, None, 1 << 40, **options)
    found = re.search(r"at most (\d+) pages", str(caught.value))
    assert found
    most = EngineConfig(num_pages=int(found[1]))
    assert with_sizes(most, loaded, None, 1 << 40, **options).num_pages == most.num_pages


# ---- on Metal


def test_a_step_on_metal_is_shorter_by_default_and_as_long_as_it_must_be() -> None:
    def budget(*, is_metal: bool, **options: Any) -> int | None:
        config = EngineConfig().with_options(**options)
        return default_step_budget(config, is_metal=is_metal).scheduler.max_num_batched_tokens

    assert budget(is_metal=True) == 512
    assert budget(is_metal=False) == 2048
    assert budget(is_metal=True, max_num_seqs=700) == 700
    assert budget(is_metal=True, enable_chunked_prefill=False, max_model_len=2048) == 2048


@pytest.mark.parametrize("is_metal", [False, True])
def test_a_chosen_number_of_tokens_per_step_is_kept(*, is_metal: bool) -> None:
    config = EngineConfig().with_options(max_num_batched_tokens=1024)
    assert default_step_budget(config, is_metal=is_metal) == config


def test_on_metal_all_rows_of_a_step_are_measured_and_not_extrapolated(
    loaded: LoadedModel,
) -> None:
    step = measured(loaded, 512, is_metal=True)
    assert step.num_rows == 512
    assert step.measured < step.planned < 1.3 * step.measured


def test_the_step_measured_on_metal_has_decodes_that_sample_and_a_chunk() -> None:
    assert measured_rows(512, 64) == (63, 449)
    assert measured_rows(64, 64) == (63, 1)
    assert measured_rows(1, 1) == (0, 1)
    assert measured_rows(8192, 64) == (63, 1985)


def test_a_chunk_is_measured_where_its_copies_are_largest(monkeypatch: pytest.MonkeyPatch) -> None:
    """MLX's attention reads copies of a long chunk's pages, which take memory: here 16 MiB a layer."""
    monkeypatch.setattr(long_chunks, "total_memory", lambda: 512 << 20)
    half, full = LayerSpec(8, 128, 128, mx.float16), LayerSpec(8, 128, 128, mx.float32)
    assert copied_positions([half, full], 512, 40_960) == [512, 4096]
    assert copied_positions([half, LayerSpec(4, 128, 128, mx.bfloat16)], 512, 40_960) == [
        4096,
        8192,
    ]
    assert copied_positions([half], 512, 1000) == [1000]
    assert copied_positions([half], 255, 40_960) == [255]
    assert copied_positions([full], 512, 40_960) == [512]
    assert copied_positions([], 512, 40_960) == [512]


def test_copies_beyond_the_measured_positions_are_planned_for() -> None:
    """At 128 Ki positions of 512 MiB a layer, three layers are under way instead of seven."""
    spec, measured = LayerSpec(8, 128, 128, mx.bfloat16), 700 << 20

    def peak(longest: int, layers: Sequence[LayerSpec] = (spec,)) -> int:
        return peak_with_copies(measured, layers, 512, 8192, longest, 16 << 30)

    assert peak(8192) == peak(4096) == measured
    assert measured < peak(32_768) < peak(131_072) == peak(1 << 20)
    assert peak(131_072) >= 2 * (512 << 20) + measured // 3
    assert peak(131_072, [replace(spec, window=1024)]) == measured
    assert peak(131_072, [replace(spec, dtype=mx.float32)]) == measured


def test_the_measured_chunk_sees_as_many_positions_as_are_copied(
    build_model: Callable[..., tuple[nn.Module, dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    real = X86Backend.paged_prefill

    def recording(backend: X86Backend, *args: Any, **options: Any) -> mx.array:
        if args[3].num_rows > len(args[3]):  # no decodes
            seen.append(int(args[3].context_lens.max()))
        return real(backend, *args, **options)

    monkeypatch.setattr(X86Backend, "paged_prefill", recording)
    model, small = build_model("llama", head_dim=64, num_hidden_layers=1)
    model.set_dtype(mx.float16)
    config = EngineConfig().with_options(
        page_size=16, max_num_batched_tokens=257, max_num_seqs=2, max_model_len=300
    )
    loaded = prepare(model, small, "half")
    assert loaded.layers[0].dtype == mx.float16
    step = measure_step(config, loaded, X86Backend(), is_metal=True, memory_limit=1 << 34)
    assert step.start == (300 - 256) // 16 * 16 == 32
    assert set(seen) == {32 + 256}


def test_measuring_on_metal_frees_its_memory(loaded: LoadedModel) -> None:
    measured(loaded, 64, is_metal=True)
    before = mx.get_active_memory()
    measured(loaded, 64, is_metal=True)
    assert mx.get_active_memory() <= before


@pytest.mark.parametrize("is_fused", [False, True], ids=["layers as defined", "fused"])
@pytest.mark.parametrize("is_quantised", [False, True], ids=["own dtype", "8 bits"])
def test_probe_and_measured_step_have_the_device_compile_every_kernel(
    is_quantised: bool, is_fused: bool, build_model: Callable[..., tuple[nn.Module, dict[str, Any]]]
) -> None:
    """What is compiled later is compiled in a running answer, as copies of pages once were."""
    used: set[str] = set()
    make = emulated_factory()

    def factory(spec: KernelSpec, source: str) -> Kernel:
        kernel = make(spec, source)

        def call(**arguments: Any) -> list[mx.array]:
            used.add(spec.name)
            return kernel(**arguments)

        return call

    model, small = build_model("llama", head_dim=64, num_hidden_layers=1)
    model.set_dtype(mx.float16)
    loaded, backend = prepare(model, small, "half"), MetalBackend(factory)
    loaded = loaded.in_8_bits() if is_quantised else loaded
    if is_fused:
        assert FusedLayers.of(loaded.model, loaded.dtype, 300)
    assert probe(loaded, backend) < (0.2 if is_quantised else 3e-2)
    config = EngineConfig().with_options(
        page_size=16, max_num_batched_tokens=257, max_num_seqs=2, max_model_len=300
    )
    measure_step(config, loaded, backend, is_metal=True, memory_limit=1 << 34)
    # Pages from the disk cache are whole ones, whose rows are quantised already. Its groups are small. Fused
    # layers write the rows that they rotate.
    unused = {GROUPED_DECODE, PAGED_LATENT, WRITE_KV_TOKENS if is_quantised else QUANTISE_KV}
    unused |= {WRITE_KV_TOKENS, QUANTISE_KV} if is_fused else {ROTATE_AND_WRITE}
    assert used == {spec.name for spec in ALL if spec not in unused}


def test_a_decode_is_recorded_while_a_step_is_measured(
    build_model: Callable[..., tuple[nn.Module, dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the fourth token of the first answer the device would compile what the recorded graph fuses."""
    ran: list[int] = []

    def record(step: Callable[..., Any]) -> Callable[..., Any]:
        def call(tokens: mx.array, *arguments: Any) -> Any:
            ran.append(tokens.shape[0])
            return step(tokens, *arguments)

        return call

    monkeypatch.setattr(step_graphs, "record", record)
    # Emulated kernels have the pool.
    monkeypatch.setattr(step_graphs, "first_pages", lambda pools: pools)
    model, small = build_model("llama", num_hidden_layers=1)
    loaded = prepare(model, small, "tiny")
    config = EngineConfig().with_options(
        page_size=16, max_num_batched_tokens=32, max_num_seqs=2, max_model_len=64
    )
    measure_step(config, loaded, emulated_backend(), is_metal=True, memory_limit=1 << 34)
    assert ran == [1]


def test_the_planned_and_the_measured_bytes_are_logged(
    loaded: LoadedModel, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "mlxserve.sizing")
    measured(loaded, 512)
    [line] = [record.message for record in caplog.records if record.message.startswith("Step")]
    assert re.fullmatch(
        r"Step of 512 tokens: [\d.]+ GiB planned, [\d.]+ GiB measured with 256 tokens in [\d.]+ s",
        line,
    )


def test_a_growing_cache_starts_with_an_eighth_or_two_full_steps() -> None:
    def first(num_pages: int, *, is_metal: bool = True, **options: int) -> int:
        config = EngineConfig(num_pages=num_pages).with_options(**options)
        return first_pages(
            default_step_budget(config, is_metal=is_metal), num_pages, is_metal=is_metal
        )

    assert first(16_000) == 2000
    assert first(800) == 2 * (512 // 32 + 64)
    assert first(100) == 100
    assert first(16_000, is_metal=False) == 2 * (2048 // 32 + 64)
    assert first(1600, page_size=64, max_num_batched_tokens=2048) == 200

"""A step of the most rows is run at load, for its peak of memory."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from metal_kernels import long_chunks
from metal_kernels.choice import select_backend
from metal_kernels.kernels import (
    ALL,
    COOPERATIVE_PREFILL,
    GROUPED_DECODE,
    GROUPED_DRAFTS,
    PAGED_LATENT,
    QMV_ROWS,
    QUANTISE_KV,
    REPLAY_DELTA,
    REPLAY_SSM,
    ROTATE_AND_WRITE,
    WRITE_KV_TOKENS,
    Kernel,
    KernelSpec,
)
from metal_kernels.long_chunks import CopiedChunks, counted_positions, longest_copied
from metal_kernels.metal import MetalBackend
from metal_kernels.x86.backend import X86Backend
from mlxserve.cache.kv import LayerSpec
from mlxserve.core.config import EngineConfig
from mlxserve.core.step_rows import layers_under_way
from mlxserve.model import step_graphs
from mlxserve.model.fused_layers import FusedLayers
from mlxserve.model.load import LoadedModel, prepare
from mlxserve.model.probe import probe
from mlxserve.model.row_speeds import measure_rows
from mlxserve.model.step_peak import (
    StepPeak,
    copied_positions,
    measure_step,
    measured_rows,
    peak_with_copies,
    planned_peak,
)
from tests.emulated import emulated_backend, emulated_factory


@pytest.fixture(scope="module")
def loaded(build_model: Callable[..., tuple[nn.Module, dict[str, Any]]]) -> LoadedModel:
    return prepare(*build_model("llama"), "tiny")


def measured(loaded: LoadedModel, rows: int, *, is_metal: bool = False) -> StepPeak:
    config = EngineConfig().with_options(
        page_size=16, max_num_batched_tokens=rows, max_num_seqs=min(rows, 64)
    )
    backend = select_backend("cpu")
    return measure_step(config, loaded, backend, is_metal=is_metal, memory_limit=1 << 34)


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


UNFUSED = CopiedChunks(64, unfused_heads=16)


def test_scores_of_unfused_attention_are_planned_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of Qwen3.5 35B: with 512 rows they take eight times as much as the copies."""
    spec, measured, memory = LayerSpec(2, 256, 256, mx.bfloat16), 700 << 20, 16 << 30

    def peak(longest: int, chosen: CopiedChunks) -> int:
        monkeypatch.setattr(long_chunks, "timed_choices", {(256, mx.bfloat16): chosen})
        return peak_with_copies(measured, [spec], 512, 8192, longest, memory)

    assert peak(8192, UNFUSED) == measured
    assert peak(16_384, UNFUSED) >= 2 * 16_384 * (2048 + 512 * (16 * 2 + 1)) + measured // 3
    assert peak(16_384, UNFUSED) > peak(16_384, CopiedChunks(64))
    # Fewer rows see more positions, whose copies have the whole share.
    assert peak(1 << 20, UNFUSED) >= 2 * (memory // 32) + measured // 3
    assert peak(1 << 20, UNFUSED) == peak(24_576, UNFUSED)
    assert peak(1 << 20, replace(UNFUSED, first_rows=513)) == measured


@pytest.mark.parametrize("rows", [64, 128, 256, 384, 512])
def test_fewer_rows_with_more_positions_stay_within_what_is_planned(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(long_chunks, "timed_choices", {(256, mx.bfloat16): UNFUSED})
    spec, longest = LayerSpec(2, 256, 256, mx.bfloat16), 1 << 20
    of_row = 230 << 10
    for memory in (8 << 30, 16 << 30, 36 << 30, 128 << 30):
        seen = min(8192, longest_copied(512, 2, 256, mx.bfloat16, memory))
        each = 2048 + 512 * 33
        before = layers_under_way(512, counted_positions(512, seen, 256, mx.bfloat16), memory)
        measured = before * (512 * of_row + seen * each)
        planned = planned_peak(
            peak_with_copies(measured, [spec], 512, seen, longest, memory), 512, 512
        )
        positions = longest_copied(rows, 2, 256, mx.bfloat16, memory)
        counted = counted_positions(rows, positions, 256, mx.bfloat16)
        of_layer = rows * of_row + positions * (2048 + UNFUSED.score_bytes(rows, mx.bfloat16))
        assert layers_under_way(rows, counted, memory) * of_layer <= planned


@pytest.mark.parametrize("architecture", ["llama", "qwen3_next"])
def test_the_measured_chunk_sees_as_many_positions_as_are_copied(
    architecture: str,
    build_model: Callable[..., tuple[nn.Module, dict[str, Any]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[int] = []
    real = X86Backend.paged_prefill

    def recording(backend: X86Backend, *args: Any, **options: Any) -> mx.array:
        if args[3].num_rows > len(args[3]):  # no decodes
            seen.append(int(args[3].context_lens.max()))
        return real(backend, *args, **options)

    monkeypatch.setattr(X86Backend, "paged_prefill", recording)
    model, small = build_model(architecture, head_dim=64, mlp_only_layers=list(range(8)))
    model.set_dtype(mx.float16)
    config = EngineConfig().with_options(
        page_size=16, max_num_batched_tokens=257, max_num_seqs=2, max_model_len=300
    )
    loaded = prepare(model, small, "half")
    assert loaded.layers[0].dtype == mx.float16
    assert loaded.has_states == (architecture == "qwen3_next")
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
        assert FusedLayers.fuse(loaded.model, loaded.dtype, 300)
    assert probe(loaded, backend) < (0.2 if is_quantised else 3e-2)
    config = EngineConfig().with_options(
        page_size=16, max_num_batched_tokens=257, max_num_seqs=2, max_model_len=300
    )
    measure_step(config, loaded, backend, is_metal=True, memory_limit=1 << 34)
    measure_rows(loaded, [backend], 16, rows=(1,))  # where something is drafted
    # Pages from the disk cache are whole ones, whose rows are quantised already. Its groups are small. Fused
    # layers write the rows that they rotate.
    # No weights are quantised.
    unused = {GROUPED_DECODE, GROUPED_DRAFTS, PAGED_LATENT, QMV_ROWS, REPLAY_DELTA, REPLAY_SSM}
    unused |= {COOPERATIVE_PREFILL}  # its trial compiles it
    unused |= {WRITE_KV_TOKENS if is_quantised else QUANTISE_KV}
    unused |= {WRITE_KV_TOKENS, QUANTISE_KV} if is_fused else {ROTATE_AND_WRITE}
    assert used == {spec.name for spec in ALL if spec not in unused}


@pytest.mark.parametrize("architecture", ["llama", "qwen3_next"])
def test_a_decode_is_recorded_while_a_step_is_measured(
    architecture: str,
    build_model: Callable[..., tuple[nn.Module, dict[str, Any]]],
    monkeypatch: pytest.MonkeyPatch,
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
    model, small = build_model(architecture, head_dim=64)
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

"""Which backend is selected, with Metal and without."""

from __future__ import annotations

import logging

import mlx.core as mx
import pytest

from metal_kernels import choice
from metal_kernels.choice import select_backend, select_backends
from metal_kernels.kernels import Kernel, KernelSpec
from metal_kernels.metal import MetalBackend
from metal_kernels.ops import Attention, LayerShape
from metal_kernels.plain import PlainBackend
from metal_kernels.selftest import QUICK, QUICK_GROUP, QUICK_WAYS, FenceLoad
from metal_kernels.step_ways import StepWay
from tests.emulated import emulated_factory
from tests.metal_kernels.oracle import Case, Paged
from tests.metal_kernels.test_draft_units import tables as drafted

SUPPORTED = [LayerShape(128, 128, mx.float16)]
UNSUPPORTED = [LayerShape(192, 128, mx.float16)]


@pytest.fixture
def mac(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with Metal whose self-test passes."""
    monkeypatch.setattr(choice, "has_metal", lambda: True)
    monkeypatch.setattr(choice, "why_not_in_place", lambda _backend, _load=QUICK: None)
    monkeypatch.setattr(choice, "why_not_together", lambda _backend: None)
    choice.why_not_metal.cache_clear()
    choice.has_matrices.cache_clear()
    choice.joins_drafts.cache_clear()
    choice.refused_ways.cache_clear()


@pytest.fixture
def broken_mac(mac: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        choice, "why_not_in_place", lambda _backend, _load=QUICK: "step 1 came late"
    )


@pytest.fixture
def no_mac(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "has_metal", lambda: False)


@pytest.mark.usefixtures("no_mac")
def test_without_metal_auto_is_cpu() -> None:
    backends = select_backends("auto", [*SUPPORTED, *UNSUPPORTED])
    assert len(backends) == 2
    assert all(isinstance(backend, PlainBackend) for backend in backends)


@pytest.mark.usefixtures("no_mac")
def test_metal_without_metal_is_refused_with_advice() -> None:
    with pytest.raises(ValueError, match=r'no Metal on this machine.*attention_backend="auto"'):
        select_backend("metal")


@pytest.mark.usefixtures("mac")
@pytest.mark.parametrize("name", ["auto", "metal"])
def test_with_metal_its_kernels_are_selected(name: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    backend, same = select_backends(name, 2 * SUPPORTED)
    assert backend is same
    assert isinstance(backend, MetalBackend)
    assert backend.name == "metal"
    assert backend.writes_in_place
    assert name == "metal" or "the self-test passed" in caplog.text


@pytest.mark.usefixtures("mac")
def test_only_layers_that_the_kernels_do_not_take_get_cpu(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    first, second, third = select_backends("auto", [*UNSUPPORTED, *SUPPORTED, *UNSUPPORTED])
    assert isinstance(second, MetalBackend)
    assert isinstance(first, PlainBackend)
    assert first is third
    assert "of 2 of 3 layers by plain mlx, which is slower: " in caplog.text
    assert caplog.text.count("got 192 and 128") == 1
    assert "attention of 1 layers by Metal kernels" in caplog.text


@pytest.mark.usefixtures("mac")
def test_metal_that_was_asked_for_is_refused_if_one_layer_cannot_have_it() -> None:
    with pytest.raises(ValueError, match='got 192 and 128; attention_backend="cpu"'):
        select_backends("metal", [*SUPPORTED, *UNSUPPORTED])


@pytest.mark.usefixtures("broken_mac")
def test_the_self_test_does_not_run_where_no_layer_needs_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    (backend,) = select_backends("auto", UNSUPPORTED)
    assert isinstance(backend, PlainBackend)
    assert "step 1 came late" not in caplog.text


@pytest.mark.usefixtures("mac")
def test_latents_of_models_get_the_kernels_and_others_plain_mlx() -> None:
    latents = [LayerShape(*dims, mx.bfloat16, is_latent=True) for dims in ((512, 64), (512, 32))]
    first, second = select_backends("auto", latents)
    assert isinstance(first, MetalBackend)
    assert isinstance(second, PlainBackend)
    with pytest.raises(ValueError, match=r"rotated keys of .*got \(512, 32\); attention_backend="):
        select_backends("metal", latents)


@pytest.mark.usefixtures("broken_mac")
def test_after_a_failed_self_test_auto_is_cpu_and_the_log_says_why(
    caplog: pytest.LogCaptureFixture,
) -> None:
    (backend,) = select_backends("auto", SUPPORTED)
    assert isinstance(backend, PlainBackend)
    assert not backend.writes_in_place
    assert "plain mlx, which is slower: step 1 came late" in caplog.text
    with pytest.raises(ValueError, match="step 1 came late"):
        select_backends("metal", SUPPORTED)


@pytest.mark.usefixtures("mac")
def test_the_self_test_runs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And once more by the kernel for many query heads per kv head, and in each way."""
    runs: list[FenceLoad] = []

    def in_place(_backend: MetalBackend, load: FenceLoad = QUICK) -> None:
        runs.append(load)

    monkeypatch.setattr(choice, "why_not_in_place", in_place)
    for _ in range(3):
        select_backend("auto")
    assert runs == [QUICK, QUICK_GROUP, *QUICK_WAYS.values()]


@pytest.mark.usefixtures("mac")
def test_after_a_failed_self_test_by_matrices_the_other_kernel_takes_their_decodes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def in_place(_backend: MetalBackend, load: FenceLoad = QUICK) -> str | None:
        return "step 1 is off by 3e-01" if load.group == 8 else None

    built: list[str] = []
    real = emulated_factory()

    def building(spec: KernelSpec, source: str) -> Kernel:
        built.append(spec.name)
        return real(spec, source)

    monkeypatch.setattr(choice, "why_not_in_place", in_place)
    monkeypatch.setattr(choice, "on_metal", building)
    backend = select_backend("auto")
    assert isinstance(backend, MetalBackend)
    found = Paged(backend, Case(((20, 1),), group=8))
    assert found.error() <= found.tolerance
    assert "paged_decode" in built
    assert "grouped_decode" not in built
    assert "without matrices, which is slower: step 1 is off by 3e-01" in caplog.text


@pytest.mark.usefixtures("mac")
@pytest.mark.parametrize("way", StepWay)
def test_steps_go_no_way_whose_self_test_fails(
    way: StepWay, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def in_place(_backend: MetalBackend, load: FenceLoad = QUICK) -> str | None:
        return "step 1 came late" if load.way is way else None

    monkeypatch.setattr(choice, "why_not_in_place", in_place)
    backend = select_backend("auto")
    assert isinstance(backend, MetalBackend)
    assert backend.without == {way}
    assert f"without {way.value}, which is slower: step 1 came late" in caplog.text


@pytest.mark.usefixtures("mac")
@pytest.mark.parametrize("reason", ["rows are others than alone in float16", None])
def test_after_a_failed_self_test_rows_of_drafts_are_decoded_one_by_one(
    reason: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    built: list[str] = []

    def building(spec: KernelSpec, source: str) -> Kernel:
        built.append(spec.name)
        return lambda **call: [
            mx.zeros(*each)
            for each in zip(call["output_shapes"], call["output_dtypes"], strict=True)
        ]

    monkeypatch.setattr(choice, "why_not_together", lambda _backend: reason)
    monkeypatch.setattr(choice, "on_metal", building)
    backend = select_backend("auto")
    pools = [backend.new_pool(8, 1, 16, 64, mx.float16) for _ in range(2)]
    rows = drafted((20, 2))
    backend.paged_decode(mx.zeros((2, 2, 64), mx.float16), *pools, rows, Attention(1.0))
    assert ("draft_decode" in built) == (reason is None)
    assert ("rows of drafts read their pages one by one" in caplog.text) == (reason is not None)


@pytest.mark.usefixtures("mac")
def test_kernels_that_fail_the_self_test_in_8_bits_alone_compute_other_layers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def in_place(_backend: MetalBackend, load: FenceLoad = QUICK) -> str | None:
        return "keys are not in the pool" if load.is_quantised else None

    monkeypatch.setattr(choice, "why_not_in_place", in_place)
    in_8_bits = [SUPPORTED[0]._replace(is_quantised=True)]
    assert [backend.name for backend in select_backends("auto", SUPPORTED)] == ["metal"]
    assert [backend.name for backend in select_backends("auto", in_8_bits)] == ["cpu"]
    with pytest.raises(ValueError, match="keys are not in the pool"):
        select_backends("metal", in_8_bits)


def test_auto_is_cpu_on_a_mac_whose_default_device_is_the_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(mx, "default_device", lambda: mx.cpu)
    assert isinstance(select_backend("auto"), PlainBackend)


@pytest.mark.parametrize("name", ["cpu", "reference"])
def test_the_backends_in_plain_mlx_are_selected_by_name(name: str) -> None:
    assert select_backend(name).name == name


def test_an_unknown_backend_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="no attention backend named 'cuda'"):
        select_backend("cuda")

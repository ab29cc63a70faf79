"""Which backend is selected, with Metal and without."""

from __future__ import annotations

import logging

import mlx.core as mx
import pytest

from metal_kernels import LayerShape, choice, select_backend
from metal_kernels.cpu.backend import CpuBackend
from metal_kernels.metal import MetalBackend

SUPPORTED = [LayerShape(128, 128, mx.float16)]
UNSUPPORTED = [*SUPPORTED, LayerShape(192, 128, mx.float16)]


@pytest.fixture
def mac(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with Metal whose self-test passes."""
    monkeypatch.setattr(choice, "has_metal", lambda: True)
    monkeypatch.setattr(choice, "why_not_in_place", lambda _backend: None)
    choice.why_not_metal.cache_clear()


@pytest.fixture
def broken_mac(mac: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "why_not_in_place", lambda _backend: "step 1 came late")


@pytest.fixture
def no_mac(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "has_metal", lambda: False)


@pytest.mark.usefixtures("no_mac")
def test_without_metal_auto_is_cpu() -> None:
    assert isinstance(select_backend("auto", UNSUPPORTED), CpuBackend)


@pytest.mark.usefixtures("no_mac")
def test_metal_without_metal_is_refused_with_advice() -> None:
    with pytest.raises(ValueError, match=r'no Metal on this machine.*attention_backend="auto"'):
        select_backend("metal")


@pytest.mark.usefixtures("mac")
@pytest.mark.parametrize("name", ["auto", "metal"])
def test_with_metal_its_kernels_are_selected(name: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    backend = select_backend(name, SUPPORTED)
    assert isinstance(backend, MetalBackend)
    assert backend.name == "metal"
    assert backend.writes_in_place
    assert name == "metal" or "the self-test passed" in caplog.text


@pytest.mark.usefixtures("mac")
def test_a_model_with_an_unsupported_layer_gets_cpu(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert isinstance(select_backend("auto", UNSUPPORTED), CpuBackend)
    assert "got 192 and 128" in caplog.text
    with pytest.raises(ValueError, match='got 192 and 128; attention_backend="cpu"'):
        select_backend("metal", UNSUPPORTED)


@pytest.mark.usefixtures("mac")
def test_metal_refuses_layers_over_latents_by_name() -> None:
    with pytest.raises(ValueError, match=r'latents .*attention_backend="cpu" does'):
        select_backend("metal", [LayerShape(128, 128, mx.float16, is_latent=True)])


@pytest.mark.usefixtures("broken_mac")
def test_after_a_failed_self_test_auto_is_cpu_and_the_log_says_why(
    caplog: pytest.LogCaptureFixture,
) -> None:
    backend = select_backend("auto", SUPPORTED)
    assert isinstance(backend, CpuBackend)
    assert not backend.writes_in_place
    assert "plain mlx, which is slower: step 1 came late" in caplog.text
    with pytest.raises(ValueError, match="step 1 came late"):
        select_backend("metal", SUPPORTED)


@pytest.mark.usefixtures("mac")
def test_the_self_test_runs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[object] = []
    monkeypatch.setattr(choice, "why_not_in_place", runs.append)
    for _ in range(3):
        select_backend("auto")
    assert len(runs) == 1


def test_auto_is_cpu_on_a_mac_whose_default_device_is_the_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(mx, "default_device", lambda: mx.cpu)
    assert isinstance(select_backend("auto"), CpuBackend)


@pytest.mark.parametrize("name", ["cpu", "reference"])
def test_the_backends_in_plain_mlx_are_selected_by_name(name: str) -> None:
    assert select_backend(name, UNSUPPORTED).name == name


def test_an_unknown_backend_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="no attention backend named 'cuda'"):
        select_backend("cuda")

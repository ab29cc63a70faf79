"""Which backend is taken, on machines that have Metal and on machines that do not."""

from __future__ import annotations

import logging

import mlx.core as mx
import pytest

from metal_kernels import choice, select_backend
from metal_kernels.cpu.backend import CpuBackend
from metal_kernels.metal import MetalBackend

TAKEN = [(128, 128, mx.float16)]
NOT_TAKEN = [*TAKEN, (192, 128, mx.float16)]


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
def test_without_metal_auto_is_the_reference() -> None:
    assert isinstance(select_backend("auto", NOT_TAKEN), CpuBackend)


@pytest.mark.usefixtures("no_mac")
def test_without_metal_asking_for_it_is_refused_with_what_to_do() -> None:
    with pytest.raises(ValueError, match=r'no Metal on this machine.*attention_backend="auto"'):
        select_backend("metal")


@pytest.mark.usefixtures("mac")
@pytest.mark.parametrize("name", ["auto", "metal"])
def test_with_metal_its_kernels_are_taken(name: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    backend = select_backend(name, TAKEN)
    assert isinstance(backend, MetalBackend)
    assert backend.name == "metal"
    assert backend.writes_in_place
    assert name == "metal" or "the self-test passed" in caplog.text


@pytest.mark.usefixtures("mac")
def test_a_layer_the_kernels_do_not_take_is_left_to_the_reference(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert isinstance(select_backend("auto", NOT_TAKEN), CpuBackend)
    assert "got 192 and 128" in caplog.text
    with pytest.raises(ValueError, match='got 192 and 128; attention_backend="cpu"'):
        select_backend("metal", NOT_TAKEN)


@pytest.mark.usefixtures("broken_mac")
def test_a_failed_self_test_leaves_attention_to_the_reference_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    backend = select_backend("auto", TAKEN)
    assert isinstance(backend, CpuBackend)
    assert not backend.writes_in_place
    assert "plain mlx, which is slower: step 1 came late" in caplog.text
    with pytest.raises(ValueError, match="step 1 came late"):
        select_backend("metal", TAKEN)


@pytest.mark.usefixtures("mac")
def test_the_self_test_runs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[object] = []
    monkeypatch.setattr(choice, "why_not_in_place", runs.append)
    for _ in range(3):
        select_backend("auto")
    assert len(runs) == 1


def test_a_mac_told_to_compute_on_the_cpu_has_no_metal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(mx, "default_device", lambda: mx.cpu)
    assert isinstance(select_backend("auto"), CpuBackend)

"""Which attention a model gets."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import pytest

from metal_kernels import choice
from metal_kernels.ops import LayerShape
from metal_kernels.x86.backend import X86Backend
from mlxserve.core.errors import InvalidConfig, UnsupportedModel
from mlxserve.model import attention
from mlxserve.model.attention import backend_names, choose_attention
from mlxserve.model.load import LoadedModel, prepare
from mlxserve.model.probe import probe

BuildModel = Callable[..., tuple[Any, dict[str, Any]]]


class Wrong(X86Backend):
    """Kernels that compile and compute something else."""

    name = "metal"

    def paged_prefill(self, *args: Any, **options: Any) -> mx.array:
        return super().paged_prefill(*args, **options) * 1.5


@pytest.fixture
def loaded(build_model: BuildModel) -> LoadedModel:
    model, config = build_model("llama")
    return prepare(model, config, "small")


def select_wrong(name: str, layers: Sequence[LayerShape]) -> list[X86Backend]:
    """Wrong kernels in the first layer."""
    first = X86Backend() if name == "cpu" else Wrong()
    return [first, *(X86Backend() for _ in layers[1:])]


def test_a_right_backend_is_taken(loaded: LoadedModel) -> None:
    _, backends, difference = choose_attention("auto", loaded)
    assert len(backends) == len(loaded.layers)
    assert backend_names(backends) in ("cpu", "metal")
    assert difference < 1e-4


def test_on_auto_wrong_kernels_give_way_to_plain_mlx_and_the_log_says_so(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(attention, "select_backends", select_wrong)
    with caplog.at_level(logging.WARNING, "mlxserve.attention"):
        _, backends, difference = choose_attention("auto", loaded)
    assert backend_names(backends) == "cpu"
    assert difference < 1e-4
    assert "plain mlx" in caplog.text
    assert "different logits" in caplog.text


def test_wrong_kernels_that_were_asked_for_are_an_error(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "select_backends", select_wrong)
    with pytest.raises(UnsupportedModel, match="different logits"):
        choose_attention("metal", loaded)


class Slightly(X86Backend):
    """Attends with scores that are a tenth too large: less than 8 bits may change."""

    def paged_prefill(self, *args: Any) -> mx.array:
        *rest, attention, sinks = args
        return super().paged_prefill(*rest, attention._replace(scale=1.1 * attention.scale), sinks)


def test_keys_and_values_in_8_bits_excuse_no_other_difference(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_8_bits = loaded.in_8_bits()
    assert probe(in_8_bits, Slightly()) < 0.2
    monkeypatch.setattr(
        attention, "select_backends", lambda _name, layers: [Slightly()] * len(layers)
    )
    with pytest.raises(UnsupportedModel, match="2e-03 is allowed"):
        choose_attention("metal", in_8_bits)
    monkeypatch.undo()
    model, _, difference = choose_attention("cpu", in_8_bits)
    assert model.is_quantised
    assert 1e-3 < difference < 0.2


def test_a_head_dimension_the_kernels_do_not_have_is_named(
    build_model: BuildModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choice, "has_metal", lambda: True)
    model, config = build_model("llama", head_dim=16)
    with pytest.raises(InvalidConfig, match=r"attention_backend: .*head dimension.* 16"):
        choose_attention("metal", prepare(model, config, "small"))

"""The probe passes models whose paged answers are their dense ones, and no others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models import llama
from mlx_lm.models.base import create_causal_mask, scaled_dot_product_attention

from metal_kernels import select_backend
from mlxserve.cache.kv import LayerKV
from mlxserve.errors import UnsupportedModel
from mlxserve.model.load import prepare
from mlxserve.model.probe import probe

REFERENCE = select_backend("cpu")
KINDS = (
    "llama",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "gemma3_text",
    "gpt_oss",
    "phi3",
    "glm4",
    "olmo2",
    "granite",
    "gemma2",
)
BuildModel = Callable[..., tuple[nn.Module, dict[str, Any]]]


@pytest.mark.parametrize("kind", KINDS)
def test_an_architecture_that_pages_passes(kind: str, build_model: BuildModel) -> None:
    assert probe(prepare(*build_model(kind), kind), REFERENCE) < 1e-4


@pytest.mark.parametrize("window", [3, 16, 24, 200, 400])
@pytest.mark.parametrize("kind", ["gemma3_text", "gpt_oss"])
def test_a_window_passes_whether_the_probe_is_longer_or_shorter(
    kind: str, window: int, build_model: BuildModel
) -> None:
    model = prepare(*build_model(kind, sliding_window=window), kind)
    assert probe(model, REFERENCE) < 1e-4


@pytest.mark.parametrize("page_size", [16, 32, 64])
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
def test_half_precision_passes_with_its_own_tolerance(
    dtype: mx.Dtype, page_size: int, build_model: BuildModel
) -> None:
    model, config = build_model("qwen3")
    model.set_dtype(dtype)
    assert probe(prepare(model, config, "half"), REFERENCE, page_size) < 3e-2


# ---- planted faults: layers that look right to everything but a comparison


class Planted(llama.Attention):  # type: ignore[misc]
    """Llama's attention, spelled out so that one step of it can be changed."""

    window: int | None = None

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        x = self.taken(x)
        shape = (*x.shape[:2], -1, 16)
        queries = self.q_proj(x).reshape(shape).swapaxes(1, 2)
        keys = self.k_proj(x).reshape(shape).swapaxes(1, 2)
        values = self.v_proj(x).reshape(shape).swapaxes(1, 2)
        offset = self.position(cache.offset)
        queries, keys = self.rope(queries, offset=offset), self.rope(keys, offset=cache.offset)
        if self.window is not None and x.shape[1] > 1:
            mask = create_causal_mask(x.shape[1], cache.offset, window_size=self.window)
        keys, values = cache.update_and_fetch(keys, values)
        output = self.attended(queries, keys, values, mask, cache)
        projected: mx.array = self.o_proj(output.swapaxes(1, 2).reshape(*x.shape[:2], -1))
        return projected

    def taken(self, x: mx.array) -> mx.array:
        return x

    def position(self, offset: Any) -> Any:
        return offset

    def attended(
        self, queries: mx.array, keys: mx.array, values: mx.array, mask: Any, cache: Any
    ) -> mx.array:
        output: mx.array = scaled_dot_product_attention(
            queries, keys, values, cache=cache, scale=self.scale, mask=mask
        )
        return output


class Shifted(Planted):
    """Rows of a step are one position off."""

    def position(self, offset: Any) -> Any:
        return offset + 1 if isinstance(offset, mx.array) else offset


class OneOffset(Planted):
    """Takes the first row's position for all of them."""

    def position(self, offset: Any) -> Any:
        return offset[0] if isinstance(offset, mx.array) else offset


class Direct(Planted):
    """Never asks its cache: a row attends to itself alone."""

    def attended(
        self, queries: mx.array, keys: mx.array, values: mx.array, mask: Any, cache: Any
    ) -> mx.array:
        return mx.fast.scaled_dot_product_attention(
            queries, keys, values, scale=self.scale, mask=mask
        )


class ShortWindow(Planted):
    """Cuts the keys to its window itself where there is one token, as a decode may."""

    window = 7


class LongWindow(Planted):
    window = 40


class MixesRows(Planted):
    """Looks at its neighbours in the batch."""

    def taken(self, x: mx.array) -> mx.array:
        return x + 0.05 * mx.mean(x, axis=0, keepdims=True)


class NotANumber(Planted):
    def taken(self, x: mx.array) -> mx.array:
        return x if x.shape[0] == 1 else x * mx.nan


class ReadsTheCache(Planted):
    """Goes behind the cache's back."""

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        output: mx.array = super().__call__(x, mask, cache) + cache.keys.sum() * 0
        return output


class OwnMask(Planted):
    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        is_paged = isinstance(cache, LayerKV)
        return super().__call__(x, mx.ones((1, 1), mx.bool_) if is_paged else mask, cache)


class LooksUp(Planted):
    """An architecture that keeps a table by layer, and not of ours."""

    def position(self, offset: Any) -> Any:
        return {int: offset}[type(offset)]


def planted(kind: type[nn.Module], build_model: BuildModel, layer: int = 1, **config: Any) -> str:
    """Plant a layer into a llama; the sentence with which the probe refuses it."""
    model, settings = build_model("llama", **config)
    model.model.layers[layer].self_attn.__class__ = kind
    loaded = prepare(model, settings, "tiny")
    with pytest.raises(UnsupportedModel) as caught:
        probe(loaded, REFERENCE)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_layer_that_faults_are_planted_in_passes_without_one(build_model: BuildModel) -> None:
    model, config = build_model("llama")
    for layer in model.model.layers:
        layer.self_attn.__class__ = Planted
    assert probe(prepare(model, config, "tiny"), REFERENCE) < 1e-4


@pytest.mark.parametrize(
    "kind", [Shifted, OneOffset, Direct, ShortWindow, MixesRows], ids=lambda kind: kind.__name__
)
@pytest.mark.parametrize("layer", [0, 2])
def test_a_layer_that_answers_otherwise_is_caught(
    kind: type[nn.Module], layer: int, build_model: BuildModel
) -> None:
    text = planted(kind, build_model, layer)
    assert "this llama model computes different logits" in text
    assert "it cannot be served" in text


def test_a_window_that_only_a_longer_prompt_shows_is_caught_where_the_config_names_it(
    build_model: BuildModel,
) -> None:
    assert "llama model computes different logits" in planted(
        LongWindow, build_model, sliding_window=40
    )


def test_answers_that_are_not_numbers_are_caught(build_model: BuildModel) -> None:
    assert "this llama model computes different logits with a paged cache (by nan" in planted(
        NotANumber, build_model
    )


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (ReadsTheCache, "'LayerKV' object has no attribute 'keys'"),
        (OwnMask, "a mask of the model's own"),
        (LooksUp, "array"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_a_layer_that_fails_is_refused_with_the_reason(
    kind: type[nn.Module], reason: str, build_model: BuildModel
) -> None:
    text = planted(kind, build_model)
    assert "llama models do not work with a paged cache" in text
    assert reason in text

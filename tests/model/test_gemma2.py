"""Gemma 2's attention over pages, including its capped scores."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models import gemma2
from mlx_lm.models.cache import make_prompt_cache

from mlxserve.model.gemma2 import use_paged_attention
from mlxserve.model.load import prepare

BuildModel = Callable[..., tuple[nn.Module, dict[str, Any]]]
IDS = mx.array([[5, 3, 8, 1, 13]])


@pytest.mark.parametrize("softcap", [0.5, 5.0, 50.0])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_paged_logits_equal_the_dense_ones(
    softcap: float, kv_heads: int, build_model: BuildModel, difference: Callable[..., float]
) -> None:
    model, config = build_model(
        "gemma2", attn_logit_softcapping=softcap, num_key_value_heads=kv_heads
    )
    assert difference(prepare(model, config, "tiny"), [0, 16, 32, 33, 37, 40]) < 1e-4


def test_the_softcap_changes_these_logits(build_model: BuildModel) -> None:
    """Otherwise the test above would pass without a cap."""
    capped, free = (
        np.array(build_model("gemma2", attn_logit_softcapping=cap)[0](IDS)) for cap in (0.5, 500.0)
    )
    assert np.abs(capped - free).max() > 1e-2 * np.abs(free).max()


def test_half_precision_stays_half_precision(
    build_model: BuildModel, difference: Callable[..., float]
) -> None:
    model, config = build_model("gemma2")
    model.set_dtype(mx.bfloat16)
    assert difference(prepare(model, config, "tiny"), [0, 5, 6]) < 1e-1


def test_the_dense_path_is_unchanged(build_model: BuildModel) -> None:
    model, config = build_model("gemma2")
    use_paged_attention(model)
    untouched = fresh_copy_of_gemma2()
    original = untouched.Model(untouched.ModelArgs.from_dict(config))
    original.update(model.parameters())
    assert type(original.layers[0].self_attn) is not type(model.layers[0].self_attn)
    expected = np.array(original(IDS, cache=make_prompt_cache(original)))
    assert np.array_equal(np.array(model(IDS, cache=make_prompt_cache(model))), expected)


def test_the_paged_path_is_added_once(build_model: BuildModel) -> None:
    model, _ = build_model("gemma2")
    use_paged_attention(model)
    call = gemma2.Attention.__call__
    use_paged_attention(model)
    assert gemma2.Attention.__call__ is call


def fresh_copy_of_gemma2() -> Any:
    """mlx-lm's module loaded a second time, whose classes were never changed."""
    spec = importlib.util.find_spec("mlx_lm.models.gemma2")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_other_architectures_are_left_alone(build_model: BuildModel) -> None:
    model, _ = build_model("llama")
    kind = type(model.model.layers[0].self_attn)
    before = kind.__call__
    use_paged_attention(model)
    assert kind.__call__ is before

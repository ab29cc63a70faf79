"""Layers with adapters beside mlx-lm's own: quantised, in half precision, and those that cannot be."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.tuner.utils import load_adapters

from metal_kernels.choice import select_backends
from metal_kernels.ops import LayerShape
from metal_kernels.reading import read
from mlxserve.core.errors import UnsupportedModel
from mlxserve.hub.adapter_files import AdapterFiles, find_adapter
from mlxserve.model.adapted_layers import AdaptedLinear
from mlxserve.model.load import LoadedModel, prepare
from mlxserve.model.probe import probe_adapters
from tests.adapters import write_adapter
from tests.conftest import write_model

BuildModel = Callable[..., tuple[nn.Module, dict[str, Any]]]
IDS = mx.array([[(7 * at) % 200 for at in range(40)]])


def adapters_of(folder: Path, kind: str) -> list[AdapterFiles]:
    base = folder / "base"
    base.mkdir()
    write_model(base, kind)
    return [
        find_adapter(name, write_adapter(folder / name, base, seed=seed, rank=4 * seed))
        for seed, name in ((1, "a"), (2, "b"))
    ]


def changed(model: nn.Module, dtype: mx.Dtype, *, bits: int | None) -> nn.Module:
    model.set_dtype(dtype)
    if bits is not None:
        nn.quantize(model, group_size=32, bits=bits)
    mx.eval(model.parameters())
    return model


def probed(loaded: LoadedModel) -> None:
    """Raises UnsupportedModel."""
    shapes = [
        LayerShape(s.key_dim, s.value_dim, s.dtype, s.is_latent, s.is_quantised)
        for s in loaded.layers
    ]
    probe_adapters(loaded, select_backends("cpu", shapes))


@pytest.mark.parametrize(
    ("kind", "dtype", "bits"),
    [
        ("llama", mx.float32, 4),
        pytest.param("llama", mx.bfloat16, None, marks=pytest.mark.slow),
        pytest.param("qwen3_moe", mx.float32, 4, marks=pytest.mark.slow),
    ],
)
def test_logits_are_those_of_mlx_lms_layers(
    kind: str, dtype: mx.Dtype, bits: int | None, build_model: BuildModel, tmp_path: Path
) -> None:
    found = adapters_of(tmp_path, kind)
    model, config = build_model(kind)
    loaded = prepare(changed(model, dtype, bits=bits), config, "tiny").with_adapters(found)
    assert loaded.adapters is not None
    probed(loaded)
    for number, one in enumerate(found):
        tuned = load_adapters(changed(build_model(kind)[0], dtype, bits=bits), str(one.path))
        tuned.eval()
        logits = loaded.adapters.applied(loaded.model, number)(IDS).astype(mx.float32)
        expected = read(tuned(IDS).astype(mx.float32))
        apart = np.abs(read(logits) - expected).max() / np.abs(expected).max()
        assert apart < (1e-5 if dtype == mx.float32 else 3e-2)
        plain = read(loaded.model(IDS).astype(mx.float32))
        assert np.abs(plain - expected).max() / np.abs(expected).max() > 0.1


def test_the_weights_are_those_that_were_loaded_and_not_copies(
    build_model: BuildModel, tmp_path: Path
) -> None:
    model, config = build_model("llama")
    loaded = prepare(model, config, "tiny")
    before, attention = loaded.weight_size, model.model.layers[0].self_attn
    projection = attention.q_proj
    loaded = loaded.with_adapters(adapters_of(tmp_path, "llama"))
    assert isinstance(attention.q_proj, AdaptedLinear)
    assert attention.q_proj.linear is projection
    matrices = sum(
        array.nbytes for name, array in tree_flatten(model.parameters()) if ".lora_" in name
    )
    assert loaded.weight_size == before + matrices


def test_a_model_without_adapters_keeps_its_layers(build_model: BuildModel) -> None:
    model, config = build_model("llama")
    loaded = prepare(model, config, "tiny")
    assert loaded.adapters is None
    assert not [module for module in model.modules() if isinstance(module, AdaptedLinear)]


def test_an_adapter_with_numbers_that_are_not_finite_is_refused(
    build_model: BuildModel, tmp_path: Path
) -> None:
    found = adapters_of(tmp_path, "llama")
    arrays = mx.load(str(found[1].weights))
    assert isinstance(arrays, dict)
    name = next(iter(arrays))
    arrays[name] = arrays[name] * mx.array(float("nan"))
    mx.save_safetensors(str(found[1].weights), arrays)
    model, config = build_model("llama")
    with pytest.raises(UnsupportedModel, match="the adapters a and b compute different logits"):
        probed(prepare(model, config, "tiny").with_adapters(found))


def test_matrices_of_whole_numbers_are_refused(build_model: BuildModel, tmp_path: Path) -> None:
    [one, _] = adapters_of(tmp_path, "llama")
    arrays = mx.load(str(one.weights))
    assert isinstance(arrays, dict)
    mx.save_safetensors(
        str(one.weights), {name: array.astype(mx.int32) for name, array in arrays.items()}
    )
    model, config = build_model("llama")
    with pytest.raises(UnsupportedModel, match=r"is in mlx\.core\.int32, and not a floating-point"):
        prepare(model, config, "tiny").with_adapters([one])


def test_a_layer_of_a_kind_that_has_no_adapters_is_named(
    build_model: BuildModel, tmp_path: Path
) -> None:
    folder = tmp_path / "a"
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"lora_parameters": {"scale": 1.0}}))
    pair = {"model.norm.lora_a": mx.ones((64, 2)), "model.norm.lora_b": mx.ones((2, 64))}
    mx.save_safetensors(str(folder / "adapters.safetensors"), pair)
    model, config = build_model("llama")
    with pytest.raises(UnsupportedModel, match=r"changes model\.norm.*there it is a RMSNorm"):
        prepare(model, config, "tiny").with_adapters([find_adapter("a", folder)])

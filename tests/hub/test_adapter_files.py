"""Which folders are adapters that can be served, and what the others are told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from mlxserve.core.errors import MlxServeError, ModelNotFound, UnsupportedModel
from mlxserve.hub.adapter_files import find_adapter, find_adapters

LAYER = "model.layers.0.self_attn.q_proj"
EXPERTS = "model.layers.1.mlp.switch_mlp.up_proj"
LORA = {
    "fine_tune_type": "lora",
    "lora_parameters": {"rank": 2, "scale": 20.0},
    "model": "org/Base",
}


def tensors(**changes: tuple[int, ...]) -> dict[str, np.ndarray]:
    shapes: dict[str, tuple[int, ...]] = {
        f"{LAYER}.lora_a": (6, 2),
        f"{LAYER}.lora_b": (2, 5),
        f"{EXPERTS}.lora_a": (3, 4, 6),
        f"{EXPERTS}.lora_b": (3, 5, 4),
        **changes,
    }
    return {name: np.ones(shape, np.float32) for name, shape in shapes.items()}


def written(folder: Path, config: Any = LORA, weights: dict[str, np.ndarray] | None = None) -> Path:
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors() if weights is None else weights, folder / "adapters.safetensors")
    return folder


def test_what_mlx_lm_has_written_is_read(tmp_path: Path) -> None:
    found = find_adapter("a", written(tmp_path))
    assert (found.name, found.scale, found.base, found.rank) == ("a", 20.0, "org/Base", 4)
    assert found.layers == {LAYER: 2, EXPERTS: 4}
    assert found.size == found.weights.stat().st_size


def test_its_digest_is_that_of_its_weights_and_scale(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in "abcd"]
    for folder in folders:
        folder.mkdir()
    other = tensors()
    other[f"{LAYER}.lora_a"][5, 1] = 2
    scaled = {**LORA, "lora_parameters": {"scale": 10.0}}
    one, same, changed, weaker = find_adapters(
        {
            "a": str(written(folders[0])),
            "b": str(written(folders[1], {**LORA, "model": "elsewhere"})),
            "c": str(written(folders[2], weights=other)),
            "d": str(written(folders[3], scaled)),
        }
    )
    assert one.digest == same.digest
    assert len({one.digest, changed.digest, weaker.digest}) == 3


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"peft_type": "LORA", "r": 8}, "in PEFT's format.*`mlx_lm.lora`"),
        ({**LORA, "fine_tune_type": "full"}, "a full fine-tune.*`mlx_lm.fuse`"),
        ({**LORA, "fine_tune_type": "dora"}, "a DoRA.*`mlx_lm.fuse`"),
        ({**LORA, "fine_tune_type": 3}, "unknown fine_tune_type '3'"),
        ({"lora_parameters": {"rank": 8, "alpha": 16}}, "no number lora_parameters.scale"),
        ({"lora_parameters": {"scale": float("inf")}}, "no number lora_parameters.scale"),
        ({"lora_parameters": {"scale": True}}, "no number lora_parameters.scale"),
        (["lora"], "not a JSON object"),
    ],
)
def test_other_kinds_are_refused_by_a_sentence(tmp_path: Path, config: Any, sentence: str) -> None:
    with pytest.raises(UnsupportedModel, match=f"The adapter a.*{sentence}"):
        find_adapter("a", written(tmp_path, config))


@pytest.mark.parametrize(
    ("weights", "sentence"),
    [
        ({}, "is empty"),
        (tensors(**{f"{LAYER}.lora_b": (3, 5)}), "do not belong together"),
        (tensors(**{"model.norm.lora_a": (6, 2)}), "do not belong together"),
        (tensors(**{f"{LAYER}.m": (5,)}), "not a matrix of LoRA"),
        (tensors(**{f"{LAYER}.weight": (5, 6)}), "not a matrix of LoRA"),
        (tensors(**{f"{LAYER}.lora_a": (0, 2)}), "not a matrix of LoRA"),
    ],
)
def test_weights_that_are_no_pairs_of_matrices_are_refused(
    tmp_path: Path, weights: dict[str, np.ndarray], sentence: str
) -> None:
    with pytest.raises(UnsupportedModel, match=sentence):
        find_adapter("a", written(tmp_path, weights=weights))


def test_a_forged_or_missing_file_is_refused(tmp_path: Path) -> None:
    folder = written(tmp_path)
    with (folder / "adapters.safetensors").open("ab") as file:
        file.write(b"more")
    refused: list[str] = []
    for change in (lambda: None, (folder / "adapters.safetensors").unlink):
        change()
        with pytest.raises(UnsupportedModel) as error:
            find_adapter("a", folder)
        refused.append(str(error.value))
    assert "damaged or forged" in refused[0]
    assert "has no adapters.safetensors" in refused[1]
    (folder / "adapter_config.json").unlink()
    with pytest.raises(ModelNotFound, match=r"has no adapter_config\.json"):
        find_adapter("a", folder)


def test_a_configuration_that_is_not_json_is_refused(tmp_path: Path) -> None:
    (written(tmp_path) / "adapter_config.json").write_text("{")
    with pytest.raises(MlxServeError, match=r"adapter_config\.json cannot be read"):
        find_adapter("a", tmp_path)

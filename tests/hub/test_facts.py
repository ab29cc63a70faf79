"""What the files of a model say about it."""

from __future__ import annotations

import json
import struct
from math import prod
from pathlib import Path
from typing import Any

import pytest

from mlxserve.hub.embedded import MODEL_NAME
from mlxserve.hub.facts import ModelFacts
from mlxserve.hub.files import ModelFiles, find_model

_SIZES = {"F32": 4, "U32": 4, "BF16": 2}


def write_weights(file: Path, **tensors: tuple[str, tuple[int, ...]]) -> None:
    """A safetensors file whose data are zeros."""
    header: dict[str, Any] = {}
    end = 0
    for name, (dtype, shape) in tensors.items():
        start, end = end, end + prod(shape) * _SIZES[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + bytes(end))


def test_the_facts_of_the_included_model_are_those_of_its_files() -> None:
    files = find_model(None)
    facts = ModelFacts.from_files(files)
    assert files.name == MODEL_NAME
    assert facts.architecture == files.config["model_type"]
    assert facts.format == "safetensors"
    assert facts.hidden_size == files.config["hidden_size"]
    assert facts.weight_size == sum(file.stat().st_size for file in files.weights)
    assert facts.num_parameters > 10_000


@pytest.mark.parametrize("group_size", [32, 64])
def test_a_quantised_tensor_counts_as_what_it_was(tmp_path: Path, group_size: int) -> None:
    """4 bits of 128 x 256 numbers, with a group of another size in one module."""
    groups = 256 // group_size
    write_weights(
        tmp_path / "model.safetensors",
        **{
            "a.weight": ("U32", (128, 32)),
            "a.scales": ("BF16", (128, groups)),
            "a.biases": ("BF16", (128, groups)),
            "a.bias": ("BF16", (128,)),
            "b.weight": ("U32", (128, 64)),
            "b.scales": ("BF16", (128, 2)),
            "norm.weight": ("F32", (256,)),
        },
    )
    quantisation = {"group_size": group_size, "bits": 4, "b": {"group_size": 128, "bits": 8}}
    config = {"model_type": "llama", "hidden_size": 256, "quantization": quantisation}
    facts = ModelFacts.from_files(ModelFiles("m", tmp_path, config))
    assert facts.num_parameters == 2 * 128 * 256 + 128 + 256
    assert facts.quantisation == "int4"


@pytest.mark.parametrize(
    ("config", "quantisation"),
    [
        ({"quantization": {"bits": 4, "group_size": 32, "mode": "mxfp4"}}, "mxfp4"),
        ({"torch_dtype": "bfloat16"}, "BF16"),
        ({"text_config": {"dtype": "float16", "model_type": "x"}}, "F16"),
        ({}, ""),
    ],
)
def test_weights_are_called_as_they_are_stored(
    tmp_path: Path, config: dict[str, Any], quantisation: str
) -> None:
    write_weights(tmp_path / "model.safetensors", **{"a.weight": ("BF16", (4, 8))})
    assert ModelFacts.from_files(ModelFiles("m", tmp_path, config)).quantisation == quantisation


def test_parameters_are_counted_in_words() -> None:
    for count, words in [
        (0, ""),
        (999, "999"),
        (134_515_008, "134.5M"),
        (1_720_574_976, "1.721B"),
        (70_600, "70.6K"),
    ]:
        assert ModelFacts(num_parameters=count).parameters_label == words, count

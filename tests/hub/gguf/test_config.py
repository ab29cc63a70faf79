"""The tables of architectures agree with transformers' and with llama.cpp's own names."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import gguf
import numpy as np
import pytest
from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

from mlxserve.core.errors import UnsupportedModel
from mlxserve.hub.gguf.config import generation_config, model_config
from mlxserve.hub.gguf.families import FAMILIES
from mlxserve.hub.gguf.family import COMMON_KEYS
from mlxserve.hub.gguf.reader import Header, TensorInfo
from mlxserve.hub.gguf.rotary import rope_scaling
from tests.hub.gguf.architectures import ARCHITECTURES, METADATA

OTHER_NAMES = {"qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe", "gpt-oss": "gpt_oss"}
# transformers' keys that say less: sizes come from the tensors, windows under their full name.
_LEFT_OUT = {"vocab_size", "rope.dimension_count", "sliding_window"}


@pytest.mark.parametrize("name", FAMILIES)
def test_metadata_means_what_transformers_says(name: str) -> None:
    theirs = GGUF_CONFIG_MAPPING.get(OTHER_NAMES.get(name, name))
    if theirs is None:
        pytest.skip("transformers does not know the architecture")
    if name in ("nemotron", "gpt2", "mamba"):
        pytest.skip("mlx-lm's options have other names; llama.cpp judges them (test_judged.py)")
    ours = {**COMMON_KEYS, **FAMILIES[name].keys}
    expected = {key: option for key, option in theirs.items() if option and key not in _LEFT_OUT}
    if name == "lfm2":  # mlx-lm's other names of the same values
        renamed = {"hidden_size": "block_dim", "intermediate_size": "block_ff_dim"}
        renamed["rms_norm_eps"] = "norm_eps"
        expected = {key: renamed.get(option, option) for key, option in expected.items()}
    assert {key: ours.get(key) for key in expected} == expected


def test_architectures_and_their_parts_are_known_to_llama_cpp() -> None:
    for name, rules in FAMILIES.items():
        [kind] = [one for one, known in gguf.MODEL_ARCH_NAMES.items() if known == name]
        known = {
            gguf.TENSOR_NAMES[one].removeprefix("blk.{bid}.") for one in gguf.MODEL_TENSORS[kind]
        }
        stems = [
            stem.removesuffix(".weight").removesuffix(".bias").removesuffix(".scale")
            for source in rules.modules.values()
            for stem in ((source,) if isinstance(source, str) else source)
        ]
        assert set(stems) <= known, name


def header(**values: object) -> Header:
    metadata = {"general.architecture": "llama", "llama.block_count": 2}
    metadata |= {"llama.embedding_length": 64, "llama.attention.head_count": 4}
    metadata |= {f"llama.{key.replace('__', '.')}": value for key, value in values.items()}
    tensor = TensorInfo("token_embd.weight", (288, 64), "F32", None, 0, 0)  # type: ignore[arg-type]
    return Header(metadata, {"token_embd.weight": tensor}, "")


def test_what_a_file_need_not_say_has_llama_cpps_defaults() -> None:
    config = model_config(header())
    assert (config["num_key_value_heads"], config["head_dim"]) == (4, 16)
    assert config["tie_word_embeddings"] is True
    assert config["vocab_size"] == 288


def test_requests_are_sampled_as_the_file_says_and_else_as_llama_cpp_does() -> None:
    silent = header()
    found = generation_config(silent)
    assert [found[name] for name in ("temperature", "top_k", "top_p", "min_p")] == [
        0.8, 40, 0.95, 0.05,
    ]  # fmt: skip
    own = {"general.sampling.temp": float(np.float32(0.2)), "general.sampling.top_k": 20}
    found = generation_config(replace(silent, metadata={**silent.metadata, **own}))
    assert (found["temperature"], found["top_k"], found["top_p"]) == (0.2, 20, 0.95)
    assert {"SAMPLING_TEMP", "SAMPLING_TOP_K", "SAMPLING_MIN_P"} < set(vars(gguf.Keys.General))


def test_numbers_are_the_shortest_that_mean_the_same() -> None:
    import struct

    [epsilon] = struct.unpack("<f", struct.pack("<f", 1e-5))
    found = model_config(header(attention__layer_norm_rms_epsilon=epsilon))
    assert found["rms_norm_eps"] == 1e-5


def test_a_file_that_does_not_say_its_size_is_refused() -> None:
    one = header()
    del one.metadata["llama.block_count"]  # type: ignore[attr-defined]
    with pytest.raises(UnsupportedModel, match=r"llama\.block_count"):
        model_config(one)


def test_a_key_size_has_precedence_over_the_rotated_one() -> None:
    assert model_config(header(rope__dimension_count=32))["head_dim"] == 32
    both = header(rope__dimension_count=32, attention__key_length=48)
    assert model_config(both)["head_dim"] == 48


def test_positions_that_are_scaled_in_an_unknown_way_are_refused() -> None:
    given = {"rope.scaling.type": "unheard-of"}
    with pytest.raises(UnsupportedModel, match="unheard-of"):
        rope_scaling(header(), given)


ODD = ("odd", 0, -1, 1 << 31, float("nan"), float("inf"), 1e38, [1, 2], ["a"], [], True)


def test_odd_values_are_refused_in_a_sentence_or_are_no_harm() -> None:
    """No value makes a list of billions of layers, or an error of Python's own."""
    for one in ARCHITECTURES:
        written = {**METADATA, **one.metadata}
        tensor = TensorInfo("token_embd.weight", (288, 64), "F32", None, 0, 0)  # type: ignore[arg-type]
        for key in (*written, "rope.scaling.type", "rope.scaling.factor", "expert_gating_func"):
            for value in ODD:
                values = {
                    f"{one.name}.{name}": item for name, item in {**written, key: value}.items()
                }
                metadata = {"general.architecture": one.name, **values}
                with contextlib.suppress(UnsupportedModel):
                    found = model_config(Header(metadata, {"token_embd.weight": tensor}, ""))
                    assert len(found.get("layer_types", ())) <= 2_000, one


@pytest.mark.parametrize("name", [7, ["llama"], None, "unheard-of"])
def test_an_odd_architecture_is_refused(name: object) -> None:
    with pytest.raises(UnsupportedModel, match="architecture"):
        model_config(Header({"general.architecture": name}, {}, ""))

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest

from mlxserve.core.sampling_params import MAX_BIAS, SamplingParams
from mlxserve.hub.files import ModelFiles
from mlxserve.hub.generation_config import GenerationConfig, for_vocabulary, read_generation_config


def read(folder: Path, content: Any, config: dict[str, Any] | None = None) -> GenerationConfig:
    (folder / "generation_config.json").write_text(json.dumps(content))
    return read_generation_config(ModelFiles("m", folder, config or {}))


def test_the_makers_sampling_is_the_default(tmp_path: Path) -> None:
    params = read(tmp_path, {"temperature": 0.6, "top_k": 20, "top_p": None}).default_params
    assert params == SamplingParams(temperature=0.6, top_k=20)


@pytest.mark.parametrize(
    "content", ["{", "[" * 100_000, b"\xff", "fifo"], ids=["cut", "deep", "utf-8", "fifo"]
)
def test_a_file_that_cannot_be_read_is_ignored_and_logged(
    tmp_path: Path, content: str | bytes, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "generation_config.json"
    if content == "fifo":
        os.mkfifo(file)
    else:
        file.write_bytes(content.encode() if isinstance(content, str) else content)
    found = read_generation_config(ModelFiles("m", tmp_path, {"eos_token_id": 3}))
    assert found == GenerationConfig((3,), SamplingParams())
    assert "cannot be read and is ignored" in caplog.text


def test_tokens_beyond_the_vocabulary_are_not_suppressed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    params = read(tmp_path, {"suppress_tokens": [7, 99, 100, 5000]}).default_params
    assert for_vocabulary(params, 100).logit_bias == {7: -MAX_BIAS, 99: -MAX_BIAS}
    assert "suppresses 2 tokens beyond the model's 100" in caplog.text
    assert for_vocabulary(params, 5001) is params


def test_a_model_that_is_not_sampled_is_greedy(tmp_path: Path) -> None:
    params = read(tmp_path, {"do_sample": False, "temperature": 0.6}).default_params
    assert params == SamplingParams(temperature=0.0)


@pytest.mark.parametrize(
    ("generation", "config", "ids"),
    [
        ({"eos_token_id": 3}, {"eos_token_id": 4}, (3,)),
        ({"eos_token_id": [3, 5]}, {}, (3, 5)),
        ({}, {"eos_token_id": [4]}, (4,)),
        ({}, {}, ()),
        ({"eos_token_id": ["</s>", 7, True, -1]}, {}, (7,)),
        ({"eos_token_id": None}, {"eos_token_id": 4}, (4,)),
        ({}, {"eos_token_id": None, "text_config": {"eos_token_id": [4, 6]}}, (4, 6)),
    ],
)
def test_generation_config_goes_before_config_about_the_tokens_that_end_an_answer(
    tmp_path: Path, generation: dict[str, Any], config: dict[str, Any], ids: tuple[int, ...]
) -> None:
    assert read(tmp_path, generation, config).eos_token_ids == ids


def test_the_makers_limit_and_suppressed_tokens_are_defaults(tmp_path: Path) -> None:
    content = {"do_sample": False, "max_new_tokens": 256, "suppress_tokens": [7, 9, "x", None]}
    assert read(tmp_path, content).default_params == SamplingParams(
        temperature=0.0, max_tokens=256, logit_bias={7: -MAX_BIAS, 9: -MAX_BIAS}
    )
    nothing = {"max_new_tokens": None, "suppress_tokens": None}
    assert read(tmp_path, nothing).default_params == SamplingParams()


@pytest.mark.parametrize(
    "content",
    [
        {"temperature": -1},
        {"top_p": 7},
        {"top_p": 0},
        {"top_k": -1},
        {"top_k": 0.5},
        {"min_p": "a little"},
        {"repetition_penalty": float("nan")},
        {"max_new_tokens": 0},
        {"suppress_tokens": [-1, 2**40]},
    ],
    ids=str,
)
def test_one_bad_value_costs_that_value_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: dict[str, Any]
) -> None:
    good = {"eos_token_id": 3, "temperature": 0.6, "top_k": 20, "max_new_tokens": 9}
    with caplog.at_level(logging.WARNING, "mlxserve.hub"):
        found = read(tmp_path, {**good, **content})
    [bad] = content
    kept = {"temperature": 0.6, "top_k": 20, "max_tokens": 9}
    kept.pop("max_tokens" if bad == "max_new_tokens" else bad, None)
    assert found == GenerationConfig((3,), SamplingParams(**kept))
    assert ("a value is ignored" in caplog.text) == (bad != "suppress_tokens")


def test_a_whole_number_may_be_written_with_a_point(tmp_path: Path) -> None:
    params = read(tmp_path, {"top_k": 20.0, "max_new_tokens": 256.0}).default_params
    assert params == SamplingParams(top_k=20, max_tokens=256)
    assert isinstance(params.top_k, int)


def test_a_missing_or_broken_file_leaves_the_defaults(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = ModelFiles("m", tmp_path, {})
    assert read_generation_config(files) == GenerationConfig((), SamplingParams())
    assert not caplog.records
    (tmp_path / "generation_config.json").write_text("{")
    assert read_generation_config(files) == GenerationConfig((), SamplingParams())
    assert "cannot be read" in caplog.text

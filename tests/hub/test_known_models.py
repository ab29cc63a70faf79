from __future__ import annotations

import pytest

from mlxserve.hub.known_models import (
    draft_of,
    known_models,
    matching,
    repository_of,
    short_name,
    short_names,
    suggestions,
)


def test_every_name_of_a_known_model_means_it() -> None:
    for model in known_models().values():
        for name in (*model.names, model.repository.rpartition("/")[2]):
            if not model.purpose or name in model.names:
                assert repository_of(name) == model.repository, name
        assert short_name(model.repository) == (None if model.purpose else model.names[0])
    assert "qwen3.5:4b" in short_names()
    assert "all-minilm" not in short_names()
    assert short_name("someone/else") is None


def test_words_find_known_models_best_first() -> None:
    assert [model.names[0] for model in matching("QWEN3.5 4b")] == ["qwen3.5:4b"]
    assert [model.names[0] for model in matching("gemma 4b")] == [
        "gemma4:e4b",
        "gemma3:4b",
        "gemma3n:e4b",
    ]
    assert matching("liquid 2.6")[0].names[0] == "lfm2.5:2.6b"
    assert matching("a3b coder")[0].names[0] == "qwen3-coder:30b"
    assert [model.names[0] for model in matching("qwen3.8")] == ["qwen3.8:27b", "qwen3.8:27b-mtp"]
    assert matching("") == matching("no such model") == []


def test_what_drafts_for_a_model_is_known() -> None:
    assert draft_of("mlx-community/Qwen3.5-4B-MLX-4bit") == "mlx-community/Qwen3.5-4B-MTP-4bit"
    assert draft_of("mlx-community/Qwen3-4B-4bit") == draft_of("someone/else") == ""


def test_short_names_are_spelled_as_people_spell_them() -> None:
    for repository, name in [
        ("mlx-community/Qwen3-0.6B-4bit", "qwen3:0.6b"),
        ("mlx-community/Llama-3.2-1B-Instruct-4bit", "llama3.2:1b"),
        ("mlx-community/Mistral-7B-Instruct-v0.3-4bit", "mistral:7b"),
        ("mlx-community/Qwen3-30B-A3B-4bit", "qwen3:30b"),
        ("mlx-community/gpt-oss-20b-MXFP4-Q8", "gpt-oss:20b"),
        ("mlx-community/GLM-4.7-Flash-4bit", "glm-4.7-flash"),
        ("mlx-community/Qwen3-Next-80B-A3B-Instruct-4bit", "qwen3-next:80b"),
        ("mlx-community/gemma-3-4b-it-4bit", "gemma3:4b"),
        ("mlx-community/gemma-4-e2b-it-4bit", "gemma4:e2b"),
        ("mlx-community/DeepSeek-R1-Distill-Llama-8B-4bit", "deepseek-r1:8b"),
        ("mlx-community/Ministral-3-8B-Instruct-2512-4bit", "ministral-3:8b"),
        ("mlx-community/Qwen2.5-Coder-7B-Instruct-4bit", "qwen2.5-coder:7b"),
        ("mlx-community/Qwen3-Coder-30B-A3B-Instruct-4bit", "qwen3-coder:30b"),
        ("mlx-community/Qwen3.5-9B-MLX-4bit", "qwen3.5:9b"),
        ("lmstudio-community/Qwen3.8-27B-MLX-4bit", "qwen3.8"),
        ("mlx-community/gemma-4-12B-it-4bit", "google/gemma4-12b"),
        ("LiquidAI/LFM2.5-2.6B-MLX-4bit", "lfm2.5:2.6b"),
        ("prism-ml/Ternary-Bonsai-27B-mlx-2bit", "bonsai:27b"),
        ("mlx-community/GLM-4.7-Flash-4bit", "glm-4.7-flash"),
        ("mlx-community/phi-4-4bit", "phi4"),
        ("mlx-community/Phi-4-mini-instruct-4bit", "phi4-mini"),
        ("mlx-community/SmolLM3-3B-4bit", "smollm3:3b"),
        ("mlx-community/phi-4-4bit", "phi4:14b"),
        ("mlx-community/Phi-4-mini-instruct-4bit", "phi4-mini:3.8b"),
        ("mlx-community/GLM-4.7-Flash-4bit", "glm-4.7-flash:latest"),
        ("mlx-community/Mistral-7B-Instruct-v0.3-4bit", "mistral"),
        ("mlx-community/gpt-oss-20b-MXFP4-Q8", "gpt-oss:latest"),
        ("mlx-community/Qwen3-4B-4bit", "qwen/qwen3-4b"),
        ("mlx-community/gemma-3-12b-it-4bit", "google/gemma-3-12b"),
        ("mlx-community/Ministral-3-3B-Instruct-2512-4bit", "mistralai/ministral-3-3b"),
        ("mlx-community/Qwen3-Coder-30B-A3B-Instruct-4bit", "qwen/qwen3-coder-30b"),
    ]:
        assert repository_of(name) == repository, repository


@pytest.mark.parametrize("spelling", ["Qwen3:4B", "qwen3-4b", "qwen3-4b-4bit", "QWEN3_4B"])
def test_spelling_does_not_matter(spelling: str) -> None:
    assert repository_of(spelling) == "mlx-community/Qwen3-4B-4bit"


@pytest.mark.parametrize(
    "name", ["Qwen/Qwen3-4B", "google/gemma-3-12b-it", "microsoft/phi-4", "openai/gpt-oss-20b"]
)
def test_the_publishers_own_repositories_stay_themselves(name: str) -> None:
    assert repository_of(name) is None


def test_other_names_mean_nothing() -> None:
    for name in ["", "qwen3", "4b", "no-such-model", "a/b/c", "x" * 5000, "\0"]:
        assert repository_of(name) is None, name


def test_names_of_other_programs_are_answered_with_sizes() -> None:
    for typed in ["gemma3", "deepseek-r1", "qwen2.5-coder", "gemma", "ministral"]:
        assert suggestions(typed), typed


def test_a_family_is_answered_with_its_sizes() -> None:
    assert suggestions("llama3.2") == ["llama3.2:1b", "llama3.2:3b"]
    assert set(suggestions("Qwen3")) >= {"qwen3:0.6b", "qwen3:4b", "qwen3:32b"}


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("lama3.2:1b", "llama3.2:1b"), ("qwen3-8", "qwen3:8b"), ("gptoss", "gpt-oss:20b")],
)
def test_a_misspelled_name_is_answered_with_close_ones(typed: str, meant: str) -> None:
    assert meant in suggestions(typed)


def test_nothing_is_suggested_for_what_resembles_nothing() -> None:
    for name in ["", "c", "a/b/c", "x" * 5000, "no-such-model"]:
        assert suggestions(name) == [], name

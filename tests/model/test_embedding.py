"""One text becomes one unit vector, pooled from the model's last hidden states."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlxserve.core.errors import InvalidParameter, InvalidRequest
from mlxserve.model.embedding import Embedding
from mlxserve.model.load import LoadedModel, prepare
from mlxserve.request import Pooling
from tests.conftest import STATEFUL, UNUSUAL, each_of

TEXT = [5, 9, 2, 7, 7, 3, 11, 4]


BuildModel = Callable[..., tuple[nn.Module, dict[str, Any]]]
Load = Callable[..., LoadedModel]


def embed(
    loaded: LoadedModel,
    token_ids: Sequence[int],
    pooling: Pooling,
    num_tokens: int = 100,
    dimensions: int | None = None,
) -> np.ndarray:
    embedding = Embedding(loaded.model, loaded.selector, token_ids, pooling, dimensions)
    while (vector := embedding.advance(num_tokens)) is None:
        pass
    return np.array(vector)


@pytest.fixture(scope="module")
def load(build_model: BuildModel) -> Load:
    """A function that builds a model of an architecture, once for this module."""
    known: dict[tuple[Any, ...], LoadedModel] = {}

    def load(kind: str, **changes: Any) -> LoadedModel:
        key = (kind, *sorted(changes.items()))
        if key not in known:
            known[key] = prepare(*build_model(kind, **changes), kind)
        return known[key]

    return load


def test_a_vector_is_the_normalised_pooled_last_hidden_state(load: Load) -> None:
    for tied in [True, False]:
        for kind in [
            "llama",
            "qwen3_moe",
            "gemma3_text",
            "gpt_oss",
            "gemma2",
            "qwen3_next",
            "lfm2",
            "gemma4_text",
        ]:
            model = load(kind, tie_word_embeddings=tied)
            hidden = np.array(model.model.model(mx.array([TEXT])))[0]
            for pooling, expected in (
                (Pooling.MEAN, hidden.mean(axis=0)),
                (Pooling.LAST, hidden[-1]),
            ):
                expected = expected / np.linalg.norm(expected)
                np.testing.assert_allclose(embed(model, TEXT, pooling), expected, atol=1e-5)


@pytest.mark.parametrize("kind", each_of([*STATEFUL, *UNUSUAL]))
def test_states_and_latents_go_from_one_piece_to_the_next(load: Load, kind: str) -> None:
    text = TEXT * 5
    whole = embed(load(kind), text, Pooling.MEAN)
    assert np.linalg.norm(whole) == pytest.approx(1, abs=1e-5)
    for num_tokens in (1, 7, 39):
        pieces = embed(load(kind), text, Pooling.MEAN, num_tokens)
        np.testing.assert_allclose(pieces, whole, atol=1e-4)


@pytest.mark.parametrize("pooling", list(Pooling))
def test_the_piece_size_does_not_change_the_vector(load: Load, pooling: Pooling) -> None:
    model = load("gemma3_text")
    text = TEXT * 5  # longer than the model's window
    whole = embed(model, text, pooling)
    for num_tokens in (1, 7, 39, 40):
        np.testing.assert_allclose(embed(model, text, pooling, num_tokens), whole, atol=1e-5)


def test_fewer_dimensions_are_the_first_ones_normalised(load: Load) -> None:
    model = load("llama")
    first = embed(model, TEXT, Pooling.MEAN)[:8]
    expected = first / np.linalg.norm(first)
    np.testing.assert_allclose(embed(model, TEXT, Pooling.MEAN, dimensions=8), expected, atol=1e-6)


def test_more_dimensions_than_the_model_has_are_refused(load: Load) -> None:
    with pytest.raises(InvalidParameter, match="dimensions: this model's vectors have 64"):
        embed(load("llama"), TEXT, Pooling.MEAN, dimensions=65)


def test_a_model_whose_head_is_not_wrapped_is_refused(build_model: BuildModel) -> None:
    model, config = build_model("llama")
    loaded = prepare(model, config, "llama")
    del model.model.embed_tokens.as_linear  # the wrapper, which hides the class's own
    with pytest.raises(InvalidRequest, match="does not expose"):
        embed(loaded, TEXT, Pooling.MEAN)


def test_a_failure_of_the_model_is_an_error_of_the_request(load: Load) -> None:
    model = load("llama")
    with pytest.raises(InvalidRequest, match="the model failed"):
        Embedding(model.model, model.selector, ["x"], Pooling.MEAN).advance(1)  # type: ignore[list-item]

import mlx.core as mx
import numpy as np
import pytest

from mlxserve.errors import InvalidParameter, InvalidRequest
from mlxserve.model.embedding import Embedding
from mlxserve.model.load import prepare
from mlxserve.request import Pooling

TEXT = [5, 9, 2, 7, 7, 3, 11, 4]


def embed(loaded, token_ids, pooling, num_tokens=100, dimensions=None):
    embedding = Embedding(loaded.model, loaded.selector, token_ids, pooling, dimensions)
    while (vector := embedding.advance(num_tokens)) is None:
        pass
    return np.array(vector)


@pytest.fixture(scope="module")
def loaded(build_model):
    return {}, build_model


def load(loaded, kind, **changes):
    known, build_model = loaded
    key = (kind, *sorted(changes.items()))
    if key not in known:
        known[key] = prepare(*build_model(kind, **changes), kind)
    return known[key]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", ["llama", "qwen3_moe", "gemma3_text", "gpt_oss", "gemma2"])
def test_a_vector_is_the_pooled_last_hidden_state_of_length_one(loaded, kind, tied):
    model = load(loaded, kind, tie_word_embeddings=tied)
    hidden = np.array(model.model.model(mx.array([TEXT])))[0]
    for pooling, expected in ((Pooling.MEAN, hidden.mean(axis=0)), (Pooling.LAST, hidden[-1])):
        expected = expected / np.linalg.norm(expected)
        np.testing.assert_allclose(embed(model, TEXT, pooling), expected, atol=1e-5)


@pytest.mark.parametrize("pooling", list(Pooling))
def test_the_size_of_the_pieces_changes_nothing(loaded, pooling):
    model = load(loaded, "gemma3_text")
    text = TEXT * 5  # longer than the model's window
    whole = embed(model, text, pooling)
    for num_tokens in (1, 7, 39, 40):
        np.testing.assert_allclose(embed(model, text, pooling, num_tokens), whole, atol=1e-5)


def test_fewer_dimensions_are_the_first_ones_of_length_one(loaded):
    model = load(loaded, "llama")
    first = embed(model, TEXT, Pooling.MEAN)[:8]
    expected = first / np.linalg.norm(first)
    np.testing.assert_allclose(embed(model, TEXT, Pooling.MEAN, dimensions=8), expected, atol=1e-6)


def test_more_dimensions_than_there_are_are_refused(loaded):
    with pytest.raises(InvalidParameter, match="dimensions: this model's vectors have 64"):
        embed(load(loaded, "llama"), TEXT, Pooling.MEAN, dimensions=65)


def test_a_model_whose_head_is_not_wrapped_is_refused(build_model):
    model, config = build_model("llama")
    loaded = prepare(model, config, "llama")
    del model.model.embed_tokens.as_linear  # the wrapper, which hides the class's own
    with pytest.raises(InvalidRequest, match="does not expose"):
        embed(loaded, TEXT, Pooling.MEAN)


def test_a_failure_of_the_model_is_an_error_of_the_request(loaded):
    model = load(loaded, "llama")
    with pytest.raises(InvalidRequest, match="the model failed"):
        Embedding(model.model, model.selector, ["x"], Pooling.MEAN).advance(1)

"""Rows of pictures in the place of tokens' embeddings."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import pytest

from metal_kernels.reading import read
from mlxserve.model.shown_pictures import Features, ShownPictures, teach

HIDDEN, PER_LAYER = 8, 4


class Text(nn.Module):  # type: ignore[misc]
    """Multiplies the embeddings of tokens, and has another of them for its layers, as Gemma 4."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_scale = 3.0
        self.embed_tokens = nn.Embedding(10, HIDDEN)
        self.embed_tokens_per_layer = nn.Embedding(10, PER_LAYER)
        self.layers: list[nn.Module] = []

    def __call__(self, tokens: mx.array) -> tuple[mx.array, mx.array]:
        return self.embed_tokens(tokens) * self.embed_scale, self.embed_tokens_per_layer(tokens)


def test_features_are_not_multiplied_and_their_rows_are_token_0_for_layers() -> None:
    text, shown = Text(), ShownPictures()
    plain = [read(each) for each in text(mx.array([0, 5, 7]))]
    teach(text, shown, num_deep=0, axes=None)
    rows = mx.random.normal((2, HIDDEN))
    with shown.showing(Features(rows), None):
        embedded, of_layers = (read(each) for each in text(mx.array([5, -2, -1, 7])))
    assert (embedded[1:3] == read(rows)[::-1]).all()
    assert (embedded[[0, 3]] == plain[0][1:]).all()
    assert (of_layers == plain[1][[1, 0, 0, 2]]).all()
    again = [read(each) for each in text(mx.array([0, 5, 7]))]
    assert all((found == expected).all() for found, expected in zip(again, plain, strict=True))


def test_a_model_without_an_embedding_that_is_known_is_refused() -> None:
    with pytest.raises(ValueError, match="no embedding of tokens that is known"):
        teach(nn.Linear(2, 2), ShownPictures(), num_deep=0, axes=None)

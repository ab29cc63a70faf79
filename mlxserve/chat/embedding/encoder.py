"""Encoder: turns a batch of texts into vectors or scores.

network ──▶ pooling ──▶ dense layers ──▶ normalisation to length 1
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn

from mlxserve.core.errors import UnsupportedModel
from mlxserve.hub.files import ModelFiles
from mlxserve.hub.headers import check_weights
from mlxserve.hub.text_encoders import DenseLayer, TextEncoder, TokenPooling

_LEAST = 1e-12
_ACTIVATIONS: Mapping[str, Callable[[mx.array], mx.array]] = {
    "identity": lambda x: x,
    "tanh": mx.tanh,
    "relu": nn.relu,
    "gelu": nn.gelu,
}


@dataclass(frozen=True, slots=True)
class EncoderText:
    """Token ids with special tokens. `second`: position of the second text of a pair."""

    ids: Sequence[int]
    second: int | None = None

    def __len__(self) -> int:
        return len(self.ids)


class Encoder(nn.Module):  # type: ignore[misc]  # mlx's nn has no types
    """A network, and the rules in its model's files."""

    def __init__(
        self,
        network: nn.Module,
        rules: TextEncoder,
        dense: Sequence[nn.Module] = (),
        padding: int = 0,
        answers: tuple[int, int] = (0, 0),
    ) -> None:
        """Combine the parts of an encoder.

        dense: layers after the pooling
        padding: the token that pads short rows
        answers: the tokens "no" and "yes" of a language model that judges
        """
        super().__init__()
        self.network = network
        self.dense = list(dense)
        self.rules = rules
        self._padding = padding
        self.answers = answers
        activations = [spec.activation for spec in rules.dense] or ["identity"] * len(self.dense)
        self._activations = tuple(_ACTIVATIONS[name] for name in activations)

    def vectors(self, texts: Sequence[EncoderText], dimensions: int | None = None) -> mx.array:
        """Return (texts, size) vectors in float32, not evaluated.

        dimensions: keep only the first components, normalised again
        """
        ids, mask, types = self._padded(texts)
        hidden = self.network(ids, mask, types).astype(mx.float32)
        pooled = mx.concatenate(
            [_POOLED[pooling](hidden, mask) for pooling in self.rules.poolings], axis=-1
        )
        for layer, activation in zip(self.dense, self._activations, strict=True):
            pooled = activation(layer(pooled))
        kept = pooled[:, :dimensions]
        return _unit(kept) if self.rules.normalizes or dimensions is not None else kept

    def scores(self, texts: Sequence[EncoderText]) -> mx.array:
        """Return (texts,) scores from 0 to 1, of a reranker; not evaluated."""
        ids, mask, types = self._padded(texts)
        output = self.network(ids, mask, types)
        if not self.rules.judges:
            return mx.sigmoid(output[:, 0].astype(mx.float32))
        no, yes = self.answers
        logits = self.network.logits(_last(output, mask)).astype(mx.float32)
        return mx.sigmoid(logits[:, yes] - logits[:, no])  # the softmax of the two

    def _padded(self, texts: Sequence[EncoderText]) -> tuple[mx.array, mx.array, mx.array | None]:
        """Return (ids, mask, types), each (texts, tokens of the longest); no types without pairs."""
        longest = max(map(len, texts))
        ids = mx.array([[*text.ids, *[self._padding] * (longest - len(text))] for text in texts])
        lengths = mx.array([len(text) for text in texts])
        mask = mx.arange(longest) < lengths[:, None]
        seconds = [longest if text.second is None else text.second for text in texts]
        if min(seconds) == longest:
            return ids, mask, None
        types = (mx.arange(longest) >= mx.array(seconds)[:, None]) & mask
        return ids, mask, types.astype(mx.int32)


def read_dense(files: ModelFiles, layers: Sequence[DenseLayer]) -> list[nn.Module]:
    """Read the layers after the pooling, in float32. Raises UnsupportedModel."""
    return [_read_dense(files, spec) for spec in layers]


def _read_dense(files: ModelFiles, spec: DenseLayer) -> nn.Module:
    place = f"{spec.weights.parent.name}/{spec.weights.name}"
    if not spec.weights.exists():
        raise UnsupportedModel(f"{files.name}: {place} is missing. Download the model again.")
    check_weights(spec.weights, files.name)
    arrays = mx.load(str(spec.weights))
    assert isinstance(arrays, dict), "it is a safetensors file"
    weights = {
        name.removeprefix("linear."): array.astype(mx.float32) for name, array in arrays.items()
    }
    layer = nn.Linear(spec.in_features, spec.out_features, bias="bias" in weights)
    try:
        layer.load_weights(list(weights.items()))
    except ValueError as error:
        raise UnsupportedModel(
            f"{files.name}: {place} does not fit its config.json: {error}"
        ) from error
    return layer


def _unit(vectors: mx.array) -> mx.array:
    return vectors / mx.maximum(mx.linalg.norm(vectors, axis=-1, keepdims=True), _LEAST)


def _sum(hidden: mx.array, mask: mx.array) -> mx.array:
    # Not a product: padding may hold anything, and 0 * NaN is NaN.
    return mx.where(mask[..., None], hidden, 0).sum(axis=1)


def _number(mask: mx.array) -> mx.array:
    return mask.sum(axis=1, keepdims=True).astype(mx.float32)


def _last(hidden: mx.array, mask: mx.array) -> mx.array:
    rows: mx.array = mx.arange(len(mask))
    return hidden[rows, mask.sum(axis=1) - 1]


def _weighted(hidden: mx.array, mask: mx.array) -> mx.array:
    """Mean of the hidden states, weighted by position."""
    weights = mx.arange(1, mask.shape[1] + 1) * mask
    return _sum(hidden * weights[..., None], mask) / weights.sum(axis=1, keepdims=True)


_POOLED: Mapping[TokenPooling, Callable[[mx.array, mx.array], mx.array]] = {
    TokenPooling.CLS: lambda hidden, _: hidden[:, 0],
    TokenPooling.MAX: lambda hidden, mask: mx.where(mask[..., None], hidden, -mx.inf).max(axis=1),
    TokenPooling.MEAN: lambda hidden, mask: _sum(hidden, mask) / _number(mask),
    TokenPooling.MEAN_SQRT: lambda hidden, mask: _sum(hidden, mask) / mx.sqrt(_number(mask)),
    TokenPooling.WEIGHTED_MEAN: _weighted,
    TokenPooling.LAST: _last,
}

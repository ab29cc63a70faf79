"""ShownPictures: substitutes rows of pictures for tokens, in whatever calls a text model.

Some of its modules get a class of the same name that also reads what is shown: the embedding, whose
output for a picture's row is the tower's; other embeddings of tokens, in which such a row is token
0; the first layers, where the tower adds to the hidden states after each (DeepStack); and where a
row has positions in time, height and width, the rotations of mlx-lm's models, or mlx-vlm's language
model, which takes them as an argument. While nothing is shown, each calls what it did before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxserve.model.definitions import VlmLanguageModel
from mlxserve.model.split_by_layers import own_layers


@dataclass(frozen=True, slots=True)
class Features:
    """The image encoder's output for rows of pictures.

    rows  (rows, hidden), in the place of a token's embedding
    deep  (rows, hidden) each: added after the first layers
    """

    rows: mx.array
    deep: tuple[mx.array, ...] = ()

    @property
    def nbytes(self) -> int:
        return int(self.rows.nbytes + sum(array.nbytes for array in self.deep))


class ShownPictures:
    """The features shown to one forward. Lives on the engine's thread."""

    def __init__(self) -> None:
        self.features: Features | None = None
        self.positions: mx.array | None = None  # (3, T)
        # True if it needs positions in every step of a request with pictures.
        self.is_told_positions = False
        self._numbers = mx.array(0)  # tokens of the embedding's last call
        self._dtype = mx.float32  # dtype of its last output

    @contextmanager
    def showing(self, features: Features | None, positions: mx.array | None) -> Iterator[None]:
        """Show features to the model: token -1 is the first row of `features`, -2 the second."""
        self.features, self.positions = features, positions
        try:
            yield
        finally:
            self.features = self.positions = None
            self._numbers = mx.array(0)

    def embed(self, numbers: mx.array, embedded: mx.array) -> mx.array:
        assert self.features is not None
        self._numbers = numbers
        self._dtype = embedded.dtype
        return self._at_rows(self.features.rows.astype(embedded.dtype), embedded)

    def scale(self, of_text: float) -> float | mx.array:
        """Factor of the last call's embeddings: `of_text`, or 1 at rows of pictures.

        Dividing features by it instead would round them twice in 16 bits.
        """
        if self.features is None:
            return of_text
        is_row = (self._numbers < 0)[..., None]
        return mx.where(is_row, mx.array(1, self._dtype), mx.array(of_text, self._dtype))

    def deepen(self, layer: int, hidden: mx.array) -> mx.array:
        assert self.features is not None
        added = self.features.deep[layer].astype(hidden.dtype)
        return hidden + self._at_rows(added, mx.zeros_like(hidden))

    def _at_rows(self, features: mx.array, others: mx.array) -> mx.array:
        """Replace rows of pictures in `others` by their features."""
        rows = features[mx.maximum(-1 - self._numbers, 0)]
        return mx.where((self._numbers < 0)[..., None], rows, others)


class _Embedding:
    _shown: ShownPictures

    def __call__(self, numbers: mx.array) -> mx.array:
        call = super().__call__  # type: ignore[misc]
        if self._shown.features is None:
            text: mx.array = call(numbers)
            return text
        return self._shown.embed(numbers, call(mx.maximum(numbers, 0)))


class _Scaling:
    """A model that scales its embedding's output (Gemma 4)."""

    _shown: ShownPictures
    _of_text: float

    @property
    def embed_scale(self) -> float | mx.array:
        return self._shown.scale(self._of_text)


class _LayersEmbedding:
    """Per-token inputs added to the hidden states of each layer (Gemma 4)."""

    _shown: ShownPictures

    def __call__(self, numbers: mx.array) -> mx.array:
        if self._shown.features is not None:
            numbers = mx.maximum(numbers, 0)
        embedded: mx.array = super().__call__(numbers)  # type: ignore[misc]
        return embedded


class _Layer:
    _shown: ShownPictures
    _number: int

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        hidden = super().__call__(*args, **kwargs)  # type: ignore[misc]
        features = self._shown.features
        if features is None or self._number >= len(features.deep):
            return hidden
        return self._shown.deepen(self._number, hidden)


class _Rotation:
    """A rotation in which each frequency has the position of its own axis."""

    _shown: ShownPictures
    _axes: mx.array
    base: float
    dims: int

    def __call__(self, x: mx.array, offset: Any = 0) -> mx.array:
        positions = self._shown.positions
        if positions is None:
            as_text: mx.array = super().__call__(x, offset=offset)  # type: ignore[misc]
            return as_text
        inverse = self.base ** (-mx.arange(0, self.dims, 2, dtype=mx.float32) / self.dims)
        angles = positions[self._axes].T * inverse  # (T, dims / 2)
        cos, sin = mx.cos(angles)[:, None, None], mx.sin(angles)[:, None, None]
        half = self.dims // 2
        a, b = x[..., :half].astype(mx.float32), x[..., half : self.dims].astype(mx.float32)
        turned = mx.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)
        return mx.concatenate([turned, x[..., self.dims :]], axis=-1)


class _Text:
    """mlx-vlm's language model."""

    _shown: ShownPictures
    language_model: Any

    def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
        positions = self._shown.positions
        if positions is None:
            as_text: mx.array = super().__call__(inputs, cache)  # type: ignore[misc]
            return as_text
        logits: mx.array = self.language_model(
            inputs, cache=cache, position_ids=positions[:, :, None]
        ).logits
        return logits


def teach(
    model: nn.Module,
    shown: ShownPictures,
    *,
    num_deep: int,
    axes: Sequence[int] | None,
    is_stage: bool = False,
) -> None:
    """Let the modules of a text model read `shown`.

    num_deep: layers after which the tower adds something
    axes: of each frequency, empty if unknown; None if rows have one position
    is_stage: other ranks have layers of this model, perhaps all that rotate

    Raises ValueError for a model whose modules are not known.
    """
    owners = [m for m in model.modules() if "embed_tokens" in m]
    if len(owners) != 1:
        raise ValueError("it has no embedding of tokens that is known")
    [owner] = owners
    _teach(owner.embed_tokens, _Embedding, shown)
    if isinstance(scale := getattr(owner, "embed_scale", None), float):
        _teach(owner, _Scaling, shown, _of_text=scale)
    if isinstance(of_layers := owner.get("embed_tokens_per_layer"), nn.Module):
        _teach(of_layers, _LayersEmbedding, shown)
    for number, layer in own_layers(model.layers[:num_deep]):
        _teach(layer, _Layer, shown, _number=number)
    if axes is not None and isinstance(model, VlmLanguageModel):
        _teach(model, _Text, shown)
        shown.is_told_positions = True
    elif axes is not None:
        ropes = [m for m in model.modules() if type(m) is nn.RoPE]
        if not (ropes or is_stage) or any(m.dims != 2 * len(axes) or m.traditional for m in ropes):
            raise ValueError("its positions of three axes are not known")
        if any(m.scale != 1 for m in ropes):
            raise ValueError("its positions are scaled")
        for rope in ropes:
            _teach(rope, _Rotation, shown, _axes=mx.array(list(axes)))


def _teach(module: Any, kind: type, shown: ShownPictures, **members: Any) -> None:
    extend(module, kind, _shown=shown, **members)


def extend(module: Any, kind: type, **members: Any) -> None:
    """Give a module a class of the same name that is called as `kind`.

    The new class's `super()` is the module's own.
    """
    known = type(module)
    module.__class__ = type(known.__name__, (kind, known), {"__module__": known.__module__})
    for name, value in members.items():
        object.__setattr__(module, name, value)  # not a parameter

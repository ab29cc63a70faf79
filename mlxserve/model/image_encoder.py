"""The image encoder of a mlx-vlm model: its towers and projectors, without the language model.

mlx-vlm's model merges features into embeddings of text (`get_input_embeddings`). Called with the
ids of a picture alone, over embeddings of zeros, what it returns at the picture's rows is what a
text model needs.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from metal_kernels.reading import evaluate
from mlxserve.images.picture import Picture
from mlxserve.model.definitions import ModelArguments
from mlxserve.model.float32 import cast_to_float32, dequantised_in_float32
from mlxserve.model.image_encoder_pieces import METAL_WORK, TowerPieces
from mlxserve.model.picture_batch import PictureBatch
from mlxserve.model.shown_pictures import Features

# Images that are computed at once, as many as `probed_axes` has tried: mlx-vlm's tower of GLM-4V is right for
# three images and not for four.
MAX_TOGETHER = 4
_TEXT = "language_model."
# Parts that no image goes through, and are not loaded.
_SOUND = ("audio_tower", "embed_audio")


class _ZeroEmbedding(nn.Module):  # type: ignore[misc]  # mlx's nn has no types
    def __init__(self, hidden: int, dtype: mx.Dtype) -> None:
        super().__init__()
        self._hidden, self._dtype = hidden, dtype

    def __call__(self, ids: mx.array) -> mx.array:
        return mx.zeros((*ids.shape, self._hidden), self._dtype)


class _NoText(nn.Module):  # type: ignore[misc]
    """Takes the place of the language model."""

    # Gemma 4 multiplies the embeddings of text, and adds others in each layer.
    embed_scale = 1.0
    hidden_size_per_layer_input = 0

    def __init__(self, hidden: int, dtype: mx.Dtype) -> None:
        super().__init__()
        self.embed_tokens = _ZeroEmbedding(hidden, dtype)

    @property
    def model(self) -> _NoText:
        return self

    def get_rope_index(self, *_: Any, **__: Any) -> tuple[None, None]:
        return None, None


class Tower:
    """The image encoder. Lives on the engine's thread."""

    def __init__(
        self,
        whole: nn.Module,
        image_token: int,
        hidden: int,
        dtype: mx.Dtype,
        max_work: int = METAL_WORK,
    ) -> None:
        """`whole`: a mlx-vlm model, whose language model is removed.

        `max_work` as in `TowerPieces`.
        """
        self._whole = whole
        self._image_token = image_token
        self._row_nbytes = hidden * dtype.size
        # Numbers of several images that may be computed at once.
        self.max_inputs = 0
        # Axes on which inputs are joined; None: one by one.
        self.axes: Mapping[str, int] | None = None
        whole.language_model = _NoText(hidden, dtype)
        self.pieces = TowerPieces(whole, max_work)

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for _, array in tree_flatten(self._whole.parameters()))

    def num_together(self, picture: Picture, max_bytes: int) -> int:
        """Number of pictures of this shape per batch, for at most `max_bytes` of features."""
        if self.axes is None:
            return 1
        features = picture.num_rows * self._row_nbytes
        limit = min(self.max_inputs // picture.num_inputs, max_bytes // features)
        return max(1, min(MAX_TOGETHER, limit))

    def features(self, pictures: Sequence[Picture]) -> tuple[list[Features], list[mx.array]]:
        """Return the features of pictures of one shape, and the outputs of the pieces, in order.

        Nothing is evaluated.
        """
        with self.pieces.collecting() as outputs:
            return self._features(PictureBatch.join(pictures, self.axes or {})), outputs

    def _features(self, batch: PictureBatch) -> list[Features]:
        ids = np.where(batch.ids < 0, self._image_token, batch.ids)
        whole = mx.array(ids)[None]
        merged = self._whole.get_input_embeddings(
            whole, mask=mx.ones_like(whole), **arguments(batch.inputs)
        )
        deep = getattr(merged, "deepstack_visual_embeds", None) or ()
        # By their indices, so that each picture's are arrays of their own, whose memory is freed with them.
        return [
            Features(
                merged.inputs_embeds[0][mx.array(at)],
                tuple(each[mx.array(rows)] for each in deep)
                if batch.num_pictures > 1
                else tuple(deep),
            )
            for at, rows in batch.rows()
        ]


def compute(tower: Tower, pictures: Sequence[Picture]) -> Generator[None, None, list[Features]]:
    """Evaluate the features of pictures of one shape, a piece before each `yield`.

    The last piece follows the last `yield`. The graph is built at once. As a part of a step's
    graph, they would be computed with each step that has rows of it.
    """
    results, pieces = tower.features(pictures)
    while pieces:
        evaluate(pieces.pop(0))
        yield
    evaluate(*(each for features in results for each in (features.rows, *features.deep)))
    return results


def arguments(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of `get_input_embeddings`, besides the ids."""
    return {name: mx.array(value) for name, value in inputs.items()}


def load_whole(
    module: ModuleType, config: Mapping[str, Any], folder: Path, text: Mapping[str, mx.array]
) -> nn.Module:
    """Load mlx-vlm's model, sharing the arrays of the language model `text`; others stay lazy.

    Raises ValueError for weights that are not the model's, and what mlx-vlm raises.
    """
    built = ModelArguments(module).from_dict(config)
    whole = module.Model(built)
    for name in _SOUND:
        if hasattr(whole, name):
            setattr(whole, name, None)
    weights: dict[str, mx.array] = {}
    for file in sorted(folder.glob("*.safetensors")):
        weights.update(mx.load(str(file)))  # type: ignore[arg-type]
    if hasattr(whole, "sanitize"):
        weights = whole.sanitize(weights)
    vision = getattr(module, "VisionModel", None)
    if vision is not None and hasattr(vision, "sanitize"):  # the order of mlx-vlm's `load_model`
        weights = vision(built.vision_config).sanitize(weights)
    weights = {name: array for name, array in weights.items() if not name.startswith(_TEXT)}
    weights |= {_TEXT + name: array for name, array in text.items()}
    _quantise(whole, config, weights)
    names = {name for name, _ in tree_flatten(whole.parameters())}
    if missing := sorted(names - weights.keys()):
        raise ValueError(f"weights lack {', '.join(missing[:3])}")
    if others := sorted(_TEXT + name for name in text if _TEXT + name not in names):
        raise ValueError(f"mlx-vlm's language model has no {', '.join(others[:3])}")
    whole.load_weights([(name, weights[name]) for name in names])
    whole.eval()
    return whole


def _quantise(whole: nn.Module, config: Mapping[str, Any], weights: Mapping[str, mx.array]) -> None:
    settings = config.get("quantization")
    if not settings:
        return

    def chosen(path: str, module: nn.Module) -> bool | dict[str, Any]:
        if not hasattr(module, "to_quantized") or f"{path}.scales" not in weights:
            return False
        own = settings.get(path)
        return own if isinstance(own, dict) else True

    nn.quantize(
        whole,
        group_size=settings["group_size"],
        bits=settings["bits"],
        mode=settings.get("mode", "affine"),
        class_predicate=chosen,
    )


def in_float32(whole: nn.Module) -> nn.Module:
    """Cast the weights to float32 on a CPU, as `load` does the text model's."""
    is_quantised = any(hasattr(module, "bits") for module in whole.modules())
    return dequantised_in_float32(whole) if is_quantised else cast_to_float32(whole)

"""Bidirectional: the layers in which rows of an image attend to all rows of the image, also to later ones.

The rule is that of transformers' models, written out (`create_masks_for_vision_model` in its modeling_gemma3.py and
modeling_gemma4.py); mlx-vlm 0.7.10 computes Gemma 3 without it, and Gemma 4 with another one:

    a row sees a position    if it is not after the row, or belongs to the same image
    with a window of W       and if it is among the last W positions before the row, or after them

An image is a run of rows that the encoder computes, without text in between. Images beside each other have tokens
around them, or they would be one.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx_lm.models.cache import KVCache

from mlxserve.hub.files import text_config
from mlxserve.images.picture import Block

# What these kinds have where config.json does not say it, as transformers' configurations have it.
_BY_DEFAULT = {"gemma4": None, "gemma4_unified": "vision"}


class Bidirectional(Enum):
    """The layers in which rows of an image attend in both directions."""

    ALL_LAYERS = auto()
    WINDOW_LAYERS = auto()  # in layers with a window only

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Bidirectional | None:
        """Return the layers of a model; None if its rows attend backwards only.

        config: that of config.json. Raises ValueError for a model whose layers are not known.
        """
        kind = str(config.get("model_type"))
        if kind == "gemma3":
            return cls.ALL_LAYERS
        default = _BY_DEFAULT.get(kind)
        is_asked = text_config(config).get("use_bidirectional_attention", default) == "vision"
        if kind in _BY_DEFAULT:
            return cls.WINDOW_LAYERS if is_asked else None
        if is_asked:
            raise ValueError(
                "its rows of an image attend in both directions, and in which layers is not known "
                f"for {kind!r}"
            )
        return None

    def mask(
        self, num_rows: int, blocks: tuple[Block, ...], window: int | None
    ) -> npt.NDArray[np.bool_]:
        """Return what each row of a whole prompt sees: (rows, rows)."""
        row, seen = np.arange(num_rows)[:, None], np.arange(num_rows)
        mask = seen <= row
        if self is Bidirectional.ALL_LAYERS or window is not None:
            for first, end in blocks:
                mask[first:end, first:end] = True
        return mask if window is None else mask & (seen > row - window)


class MaskedCache(KVCache):  # type: ignore[misc]  # mlx-lm's has no types
    """A cache of mlx-lm that gives a layer such a mask, for a whole prompt at once."""

    def __init__(self, layers: Bidirectional, blocks: tuple[Block, ...]) -> None:
        super().__init__()
        self._layers = layers
        self._blocks = blocks

    def make_mask(
        self,
        N: int,  # noqa: N803 (the name in mlx-lm's caches)
        return_array: bool = False,  # noqa: ARG002
        window_size: int | None = None,
    ) -> mx.array:
        assert self.offset == 0, "a prompt at once"
        return mx.array(self._layers.mask(N, self._blocks, window_size))

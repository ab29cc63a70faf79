"""Vision: what lets a text model see. A tower's features by picture, and what a step is shown of them.

    image ── ImageProcessor ──▶ Picture ── Tower ──▶ Features ── ShownPictures ──▶ the text model
             a client's thread             the engine's thread

The text model is the one that is served in any case. Features are kept by the picture's key within a bound, and
computed again where they are missing: a running request whose pages were given up may need them much later.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from contextlib import AbstractContextManager
from typing import NamedTuple

import mlx.core as mx

from metal_kernels.reading import DeviceError, evaluate
from mlxserve.errors import InvalidRequest, in_one_line
from mlxserve.images.picture import Picture, PictureReader
from mlxserve.model.dense_text import TextWork
from mlxserve.model.picture_rows import PictureRows
from mlxserve.model.shown_pictures import Features, ShownPictures
from mlxserve.model.vision_tower import Tower

log = logging.getLogger("mlxserve.vision")

MOST_FEATURES = (
    512 << 20
)  # bytes that are kept: 40 images of 1,024 rows with a hidden size of 3,584


_TOWER_ERRORS = (ValueError, TypeError, AttributeError, LookupError, RuntimeError)


class VisionUse(NamedTuple):
    """Counts since the start."""

    num_computed: int  # pictures
    num_kept: int
    nbytes: int  # of those that are kept


class Seeing(TextWork[int]):
    """A picture whose features are wanted: computed in one piece between two steps, unless they are kept.

    Its result is the number of rows. None of them count as done: a tower has another pace than text has.
    """

    def __init__(self, vision: Vision, picture: Picture) -> None:
        self._vision = vision
        self._picture = picture

    def advance(self, num_tokens: int) -> int:  # noqa: ARG002
        """Raises InvalidRequest where the tower fails, and DeviceError."""
        try:
            self._vision.see(self._picture)
        except DeviceError:
            raise
        except _TOWER_ERRORS as error:
            raise InvalidRequest(
                f"messages: the model's vision failed on an image: {in_one_line(error)}"
            ) from error
        return self._picture.num_rows

    def release(self) -> None:
        """Nothing is held."""


class Vision:
    """Lives on the engine's thread, but for `reader`."""

    def __init__(
        self,
        tower: Tower,
        shown: ShownPictures,
        reader: PictureReader,
        *,
        most_bytes: int = MOST_FEATURES,
    ) -> None:
        self.reader = reader
        self._tower = tower
        self._shown = shown
        self._most_bytes = most_bytes
        self._features: OrderedDict[bytes, Features] = OrderedDict()  # the last used is the last
        self._nbytes = 0
        self._num_computed = 0

    @property
    def nbytes(self) -> int:
        """Of the tower's weights."""
        return self._tower.nbytes

    @property
    def is_told_positions(self) -> bool:
        """Whether the text model is told positions of every step in which a request has pictures."""
        return self._shown.is_told_positions

    def use(self) -> VisionUse:
        return VisionUse(self._num_computed, len(self._features), self._nbytes)

    def see(self, picture: Picture) -> Features:
        """The features of a picture, computed unless they are kept."""
        found = self._features.get(picture.key)
        if found is not None:
            self._features.move_to_end(picture.key)
            return found
        found = self._tower.features(picture)
        # Evaluated here: as a part of a step's graph it would be computed with each step that has rows of it.
        evaluate(found.rows, *found.deep)
        self._num_computed += 1
        self._features[picture.key] = found
        self._nbytes += found.nbytes
        while self._nbytes > self._most_bytes and len(self._features) > 1:
            _, oldest = self._features.popitem(last=False)
            self._nbytes -= oldest.nbytes
        return found

    def forget(self) -> None:
        """Free all features; they are computed again where they are needed."""
        self._features.clear()
        self._nbytes = 0

    def showing(self, pictures: PictureRows) -> AbstractContextManager[None]:
        """While the text model is called for a step."""
        positions = None
        if pictures.positions is not None and (pictures.parts or self.is_told_positions):
            positions = mx.array(pictures.positions)
        if not pictures.parts:
            return self._shown.showing(None, positions)
        parts = [(self.see(part.picture), part) for part in pictures.parts]
        rows = mx.concatenate([found.rows[part.first : part.end] for found, part in parts])
        num_deep = len(parts[0][0].deep)
        deep = tuple(
            mx.concatenate([found.deep[layer][part.first : part.end] for found, part in parts])
            for layer in range(num_deep)
        )
        return self._shown.showing(Features(rows, deep), positions)

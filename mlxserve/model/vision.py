"""Vision: what lets a text model see. A tower's features by picture, and what a step is shown of them.

    image ── ImageProcessor ──▶ Picture ── Tower ──▶ Features ── ShownPictures ──▶ the text model
             a client's thread             the engine's thread

The text model is the one that is served in any case. Features are kept by the picture's key within a bound, and
computed again where they are missing: a running request whose pages were given up may need them much later.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Generator
from contextlib import AbstractContextManager

import mlx.core as mx

from metal_kernels.reading import DeviceError, evaluate
from mlxserve.errors import InvalidRequest, in_one_line
from mlxserve.images.picture import Picture, PictureReader
from mlxserve.model.dense_text import TextWork
from mlxserve.model.picture_rows import PictureRows
from mlxserve.model.shown_pictures import Features, ShownPictures
from mlxserve.model.vision_tower import Tower
from mlxserve.stats import VisionStats

log = logging.getLogger("mlxserve.vision")

MOST_FEATURES = (
    512 << 20
)  # bytes that are kept: 40 images of 1,024 rows with a hidden size of 3,584


_TOWER_ERRORS = (ValueError, TypeError, AttributeError, LookupError, RuntimeError)


class Seeing(TextWork[int]):
    """A picture whose features are wanted: computed layer by layer between steps, unless they are kept.

    Its result is the number of rows. None of them count as done: a tower has another pace than text has.
    """

    def __init__(self, vision: Vision, picture: Picture) -> None:
        self._vision = vision
        self._picture = picture
        self._pieces: Generator[None] | None = None

    def advance(self, num_tokens: int) -> int | None:  # noqa: ARG002
        """One layer of the tower. Raises InvalidRequest where the tower fails, and DeviceError."""
        try:
            self._pieces = self._pieces or self._vision.look(self._picture)
            for _ in self._pieces:
                return None
        except DeviceError:
            raise
        except _TOWER_ERRORS as error:
            raise InvalidRequest(
                f"messages: the model's vision failed on an image: {in_one_line(error)}"
            ) from error
        return self._picture.num_rows

    def release(self) -> None:
        if self._pieces is not None:
            self._pieces.close()


class Vision:
    """Lives on the engine's thread, but for `reader`."""

    def __init__(
        self,
        tower: Tower,
        shown: ShownPictures,
        reader: PictureReader,
        *,
        most_bytes: int | None = None,
    ) -> None:
        """most_bytes: of features that are kept; None for `MOST_FEATURES`"""
        self.reader = reader
        self._tower = tower
        self._shown = shown
        self._most_bytes = MOST_FEATURES if most_bytes is None else most_bytes
        self._features: OrderedDict[bytes, Features] = OrderedDict()  # the last used is the last
        self._stats = VisionStats()

    @property
    def nbytes(self) -> int:
        """Of the tower's weights."""
        return self._tower.nbytes

    @property
    def is_told_positions(self) -> bool:
        """Whether the text model is told positions of every step in which a request has pictures."""
        return self._shown.is_told_positions

    def stats(self) -> VisionStats:
        return self._stats.copy()

    def see(self, picture: Picture) -> Features:
        """The features of a picture, computed unless they are kept."""
        for _ in self.look(picture):
            pass
        found = self._features[picture.key]
        self._features.move_to_end(picture.key)
        return found

    def look(self, picture: Picture) -> Generator[None]:
        """Compute the features of a picture unless they are kept, in pieces of a layer of the tower.

        The graph is built at once. Evaluated here: as a part of a step's graph, they would be computed with
        each step that has rows of it.
        """
        if picture.key in self._features:
            return
        found, layers = self._tower.features(picture)
        while layers:
            evaluate(layers.pop(0))
            yield
        evaluate(found.rows, *found.deep)
        self._keep(picture.key, found)

    def _keep(self, key: bytes, found: Features) -> None:
        self._features[key] = found
        stats = self._stats
        stats.num_computed += 1
        stats.num_bytes += found.nbytes
        while stats.num_bytes > self._most_bytes and len(self._features) > 1:
            _, oldest = self._features.popitem(last=False)
            stats.num_bytes -= oldest.nbytes
        stats.num_kept = len(self._features)

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

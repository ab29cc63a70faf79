"""Vision: the image encoder of a text model, with cached features by picture.

    image ── ImageProcessor ──▶ Picture ── Tower ──▶ Features ── ShownPictures ──▶ the text model
             a client's thread             the engine's thread

The text model is the one that is served in any case. Features are kept by the picture's key within
a bound, and computed again where they are missing: a running request whose pages were given up may
need them much later.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager
from itertools import islice
from weakref import WeakKeyDictionary

import mlx.core as mx

from metal_kernels.reading import DeviceError
from mlxserve.core.errors import InvalidRequest, in_one_line
from mlxserve.core.stats import VisionStats
from mlxserve.images.picture import Picture, PictureReader
from mlxserve.model.bidirectional import Bidirectional
from mlxserve.model.dense_text import TextWork
from mlxserve.model.image_encoder import Tower, compute
from mlxserve.model.picture_batch import has_shape_of
from mlxserve.model.picture_rows import PictureRows
from mlxserve.model.shared_features import SharedFeatures
from mlxserve.model.shown_pictures import Features, ShownPictures

log = logging.getLogger("mlxserve.vision")

# Bytes that are kept: 40 images of 1,024 rows with a hidden size of 3,584.
MAX_FEATURES = 512 << 20


_TOWER_ERRORS = (ValueError, TypeError, AttributeError, LookupError, RuntimeError)


class ImageEncoding(TextWork[int]):
    """Work item that encodes a request's uncached images between steps.

    Its result is the number of rows. None of them count as done: the encoder has another pace than
    text has.
    """

    def __init__(
        self,
        vision: Vision,
        pictures: Sequence[Picture],
        seconds: Callable[[], float] = lambda: 0.0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`seconds`: time budget of `advance`, which always computes at least one piece."""
        self._vision = vision
        self._pictures = pictures
        self._seconds = seconds
        self._clock = clock
        self._pieces: Generator[bool] | None = None
        # None when its caller has left. From any thread.
        self.pictures = tuple(pictures)
        vision.expect(self)

    @property
    def num_rows(self) -> int:
        return sum(picture.num_rows for picture in self._pictures)

    def leave(self) -> None:
        """Stop computing its pictures in others' batches. Thread-safe."""
        self.pictures = ()

    def advance(self, num_tokens: int) -> int | None:  # noqa: ARG002
        """Compute pieces of layers for about `seconds`.

        Raises InvalidRequest if the encoder fails, and DeviceError.
        """
        end = self._clock() + self._seconds()
        try:
            self._pieces = self._pieces or self._look()
            for was_computed in self._pieces:
                if not was_computed or self._clock() >= end:
                    return None
        except DeviceError:
            raise
        except _TOWER_ERRORS as error:
            raise InvalidRequest(
                f"messages: the model's vision failed on an image: {in_one_line(error)}"
            ) from error
        return self.num_rows

    def _look(self) -> Generator[bool]:
        for picture in self._pictures:
            yield from self._vision.look(picture)

    def release(self) -> None:
        if self._pieces is not None:
            self._pieces.close()


class Vision:
    """Lives on the engine's thread, except `reader`."""

    def __init__(
        self,
        tower: Tower,
        shown: ShownPictures,
        reader: PictureReader,
        *,
        max_bytes: int = MAX_FEATURES,
        step_nbytes: int = 0,
        bidirectional: Bidirectional | None = None,
        longest_block: int = 0,
    ) -> None:
        """max_bytes: bound of the cached features.

        step_nbytes: bytes that the encoder needs for any image, besides its weights
        bidirectional: layers in which rows of an image attend in both directions
        longest_block: rows of an image that one step computes; 0 if an image may be divided
        """
        self.reader = reader
        self.bidirectional = bidirectional
        self.longest_block = longest_block
        self.tower = tower
        self._shown = shown
        self._max_bytes = max_bytes
        self._step_nbytes = step_nbytes
        self._shared: SharedFeatures | None = None
        self._under_way: set[bytes] = set()  # keys of pictures being computed
        self._expected: WeakKeyDictionary[ImageEncoding, None] = (
            WeakKeyDictionary()
        )  # in their order
        self._features: OrderedDict[bytes, Features] = OrderedDict()  # the last used is the last
        self._owners: dict[bytes, str] = {}  # of these features
        self._stats = VisionStats()

    @property
    def nbytes(self) -> int:
        """Bytes of the encoder's weights."""
        return self.tower.nbytes

    def planned_nbytes(self, num_rows: int) -> int:
        """Bytes reserved for images: the encoder's step, cached features, and those of `num_rows` sent to ranks."""
        sent = 0 if self._shared is None else self._shared.nbytes(num_rows)
        return self._step_nbytes + self._max_bytes + sent

    @property
    def is_told_positions(self) -> bool:
        """True if the text model needs positions in every step of a request with pictures."""
        return self._shown.is_told_positions

    def share_by(self, shared: SharedFeatures) -> None:
        """Send the features of each step to other ranks."""
        self._shared = shared

    def stats(self) -> VisionStats:
        return self._stats.copy()

    def keeps(self, key: bytes) -> bool:
        """True if a picture's features are cached; they count as used."""
        if key not in self._features:
            return False
        self._features.move_to_end(key)
        return True

    def expect(self, seeing: ImageEncoding) -> None:
        """Let the pictures of this work be computed in others' batches, if those come first."""
        self._expected[seeing] = None

    def see(self, picture: Picture) -> Features:
        """Return a picture's features, computing them if they are not cached."""
        if not self.keeps(picture.key):
            for _ in self._compute([picture]):
                pass
        return self._features[picture.key]

    def look(self, picture: Picture) -> Generator[bool]:
        """Compute the features of a picture and of waiting ones of its shape, unless cached.

        Yields after each piece of a layer whether it was computed, or is waited for because it is
        computed for another request.
        """
        while picture.key in self._under_way:
            yield False
        if self.keeps(picture.key):
            return
        together = [picture, *self._others_like(picture)]
        keys = {each.key for each in together}
        self._under_way |= keys
        try:
            for _ in self._compute(together):
                yield True
        finally:
            self._under_way -= keys

    def _others_like(self, picture: Picture) -> list[Picture]:
        """Waiting pictures of the same shape, to compute with it."""
        limit = self.tower.num_together(picture, self._max_bytes // 2) - 1
        if limit < 1:
            return []
        waiting = {each.key: each for seeing in self._expected for each in seeing.pictures}
        like = (
            each
            for key, each in waiting.items()
            if key != picture.key
            and key not in self._under_way
            and key not in self._features
            and has_shape_of(picture, each)
        )
        return list(islice(like, limit))

    def _compute(self, pictures: Sequence[Picture]) -> Generator[None]:
        results = yield from compute(self.tower, pictures)
        for picture, features in zip(reversed(pictures), reversed(results), strict=True):
            # The first one last: it is needed first.
            self._keep(picture, features)

    def _keep(self, picture: Picture, features: Features) -> None:
        stats = self._stats
        stats.num_computed += 1
        if picture.key in self._features:
            # A step needed them meanwhile.
            return
        self._features[picture.key] = features
        self._owners[picture.key] = picture.owner
        stats.num_bytes += features.nbytes
        while stats.num_bytes > self._max_bytes and len(self._features) > 1:
            self._give_up_one()
        stats.num_kept = len(self._features)

    def _give_up_one(self) -> None:
        """Drop the least recently used features of the API key that has most, but not the newest."""
        *others, _ = self._features
        sizes = Counter[str]()
        for key in others:
            sizes[self._owners[key]] += self._features[key].nbytes
        [(owner, _)] = sizes.most_common(1)
        oldest = next(key for key in others if self._owners[key] == owner)
        self._stats.num_bytes -= self._features.pop(oldest).nbytes
        del self._owners[oldest]

    def showing(self, pictures: PictureRows) -> AbstractContextManager[None]:
        """Show the pictures' features while the text model is called for a step."""
        positions = None
        if pictures.positions is not None and (pictures.parts or self.is_told_positions):
            positions = mx.array(pictures.positions)
        if not pictures.parts:
            return self._shown.showing(None, positions)
        parts = [(self.see(part.picture), part) for part in pictures.parts]
        rows = mx.concatenate([features.rows[part.first : part.end] for features, part in parts])
        num_deep = len(parts[0][0].deep)
        deep = tuple(
            mx.concatenate(
                [features.deep[layer][part.first : part.end] for features, part in parts]
            )
            for layer in range(num_deep)
        )
        features = Features(rows, deep)
        if self._shared is not None:
            features = self._shared.share(features, pictures.num_rows)
        return self._shown.showing(features, positions)

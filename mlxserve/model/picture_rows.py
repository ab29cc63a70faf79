"""PictureRows: the pictures of a step's requests, and where its rows are in them.

Among the tokens of a step, a picture's rows have negative numbers: -1 is the first row of the step's
features, -2 the second, in whatever order and shape a model is called with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mlxserve.images.picture import Picture, Placed, positions_of
from mlxserve.request import Chunk

IntArray = npt.NDArray[np.int32]


class PictureRun(NamedTuple):
    """The rows of a picture from `first` to `end`."""

    picture: Picture
    first: int
    end: int


@dataclass(frozen=True, slots=True)
class PictureRows:
    """Rows of pictures in a step.

    parts      of pictures whose features are rows of the step, in the order of their numbers
    positions  (3, T), of each row in time, height and width; None if all are the row's index
    """

    parts: tuple[PictureRun, ...]
    positions: IntArray | None

    @classmethod
    def from_chunks(cls, chunks: Sequence[Chunk], tokens: IntArray) -> PictureRows:
        """Locate the rows; replaces picture ids in the step's `tokens` by numbers of rows."""
        parts: list[PictureRun] = []
        positions = np.empty((3, len(tokens)), np.int32)
        has_grids = False
        at = num_rows = 0
        for chunk in chunks:
            end = at + chunk.length
            pictures = chunk.request.asked.pictures
            has_grids = has_grids or any(placed.picture.grid is not None for placed in pictures)
            positions[:, at:end] = positions_of(pictures, chunk.start, chunk.end)
            parts_of_chunk = _parts(pictures, chunk.start, chunk.end)
            if parts_of_chunk:
                inside = tokens[at:end]
                is_row = inside < 0
                count = int(is_row.sum())
                inside[is_row] = np.arange(-num_rows - 1, -num_rows - 1 - count, -1)
                num_rows += count
                parts += parts_of_chunk
            at = end
        return cls(tuple(parts), positions if has_grids else None)

    @property
    def num_rows(self) -> int:
        """Number of rows in all parts."""
        return sum(part.end - part.first for part in self.parts)


def _parts(pictures: Placed, start: int, end: int) -> list[PictureRun]:
    parts = []
    for placed in pictures:
        first, last = (
            max(start, placed.start) - placed.start,
            min(end, placed.end) - placed.start,
        )
        if first < last:
            rows = placed.picture.rows_before
            parts.append(PictureRun(placed.picture, int(rows[first]), int(rows[last])))
    return [part for part in parts if part.first < part.end]

"""Pictures as numbers, for ranks that compute rows of them and have no image encoder.

    number of pictures, and for each of them
    [ start, number of ids, 1 if bidirectional, grid in time, height and width or zeros ] [ ids ]

By these a rank finds the rows, their positions and the images that one step computes, as rank 0 does.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import NamedTuple

from mlxserve.images.picture import Block, Picture, Placed, PlacedPicture, blocks_of

_COLUMNS = 6  # numbers of a picture before its ids


class ToldPictures(NamedTuple):
    """The pictures of a request and their blocks, as a forward reads them."""

    pictures: Placed
    blocks: tuple[Block, ...]


NO_PICTURES = ToldPictures((), ())


def numbers_of(pictures: Placed) -> Iterator[int]:
    """Encode the pictures of a request, without the encoder's inputs."""
    yield len(pictures)
    for placed in pictures:
        picture = placed.picture
        yield from (placed.start, len(picture.ids), picture.is_bidirectional)
        yield from picture.grid or (0, 0, 0)
        yield from picture.ids


def pictures_in(numbers: array[int], at: int) -> tuple[ToldPictures, int]:
    """Decode the pictures at index `at`; return them and the index after them.

    Raises ValueError or IndexError for numbers that `numbers_of` does not return.
    """
    count, at = numbers[at], at + 1
    pictures = []
    for _ in range(count):
        start, num_ids, is_bidirectional, *grid = numbers[at : at + _COLUMNS]
        at += _COLUMNS
        ids = numbers[at : at + num_ids]
        if not 0 < num_ids == len(ids) or len(grid) != 3:
            raise ValueError("a picture without its ids")
        at += num_ids
        time, height, width = grid
        picture = Picture(
            b"",  # nothing is hashed here
            ids,
            {},
            (time, height, width) if time else None,
            is_bidirectional=bool(is_bidirectional),
        )
        pictures.append(PlacedPicture(start, picture))
    return ToldPictures(tuple(pictures), blocks_of(tuple(pictures))), at
